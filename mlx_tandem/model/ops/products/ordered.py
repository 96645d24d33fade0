"""The linears of a model, computed in tiles of rows.

Products in tiles of rows: the bits of a row's result do not depend on which rows are beside it, or on how many.

A library for matrix products chooses the order of sums by the number of rows, and some libraries choose it by a row's
place, too. So rows are cut into tiles whose sizes give equal bits, and a tile with missing rows is filled with rows of
zeros. A check at start finds these sizes for each product, on the device and with the number of threads that will
serve. It uses random numbers, since the order of sums does not depend on the numbers that are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.modules import mix_in

Tiled = Callable[[mx.array, Sequence[int]], mx.array]
"""A product of rows [rows, inputs] in tiles of these sizes, which returns [rows, outputs]."""

Product = Callable[[mx.array], mx.array]
"""A function of rows [rows, inputs] that returns [rows, outputs]."""

SMALLEST = 64
"""Most rows of the smallest tile size of a product. A step of one row computes as many rows as this tile has."""


_PADDED = 1.5
"""Most rows that a partly filled tile may have for each row in it, where smaller tiles could be used instead."""


def cut(rows: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the tiles for so many rows, in their order; the last may have more rows than are left."""
    tiles = []
    while rows > 0:
        below = max((size for size in sizes if size <= rows), default=0)
        above = min((size for size in sizes if size >= rows), default=0)
        tiles.append(above if above and (not below or above <= _PADDED * rows) else below)
        rows -= tiles[-1]
    return tiles


def in_tiles(product: Product, x: mx.array, sizes: Sequence[int]) -> mx.array:
    """Return the product for the rows of x [rows, inputs], a tile at a time."""
    rows, tiles = x.shape[0], cut(x.shape[0], sizes)
    padded = _padded(x, sum(tiles))
    if len(tiles) == 1:
        return product(padded)[:rows]
    starts = np.cumsum([0, *tiles]).tolist()
    parts = [product(padded[start : start + size]) for start, size in zip(starts, tiles, strict=False)]
    return mx.concatenate(parts)[:rows]


def matmul(x: mx.array, weights: mx.array, sizes: Sequence[int]) -> mx.array:
    """Return x @ weights for x [..., rows, inputs] and weights [..., inputs, outputs], a tile of rows at a time.

    The leading axes of both are equal. The products of all tiles are one batch, which a CPU computes one by one.
    """
    rows = x.shape[-2]
    size = next((size for size in sizes if size >= rows), sizes[-1])
    tiles = -(-rows // size)
    padded = _padded(x, tiles * size)
    y = padded.reshape(*x.shape[:-2], tiles, size, x.shape[-1]) @ mx.expand_dims(weights, -3)
    return y.reshape(*y.shape[:-3], tiles * size, -1)[..., :rows, :]


def _padded(x: mx.array, rows: int) -> mx.array:
    """Return x [..., any number, inputs] with rows of zeros appended, so that it has `rows` rows."""
    missing = rows - x.shape[-2]
    return mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x


def sizes_of(tiled: Tiled, inputs: int, dtype: mx.Dtype, what: str) -> tuple[int, ...]:
    """Return sizes of tiles, ascending, all of which give a row of this product the same bits in every place of a tile.

    Sizes that agree with each other form a set. Of the sets whose smallest size is at most SMALLEST, the one with the
    largest size is returned. Raise ModelError if there is no such set. `what` names the product in the error.
    """
    agreeing: list[tuple[list[int], bytes]] = []
    for size in backend.current().products.tile_sizes:
        bits = keeps_places(tiled, inputs, dtype, size)
        if not bits:
            continue
        known = next((sizes for sizes, own in agreeing if own == bits), None)
        if known is None:
            agreeing.append(([size], bits))
        else:
            known.append(size)
    usable: list[list[int]] = [sizes for sizes, _ in agreeing if sizes[0] <= SMALLEST]
    if not usable:
        raise ModelError(
            f"--deterministic: on this device {what} give a row other bits in another place", param="deterministic"
        )
    return tuple(sorted(usable, key=lambda sizes: sizes[-1])[-1])


def keeps_places(tiled: Tiled, inputs: int, dtype: mx.Dtype, size: int) -> bytes:
    """Return the bytes of a product of random rows in tiles of this size; empty if a row's bits depend on its place."""
    most = backend.current().products.tile_sizes[-1]
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((most, inputs)).astype(np.float32)).astype(dtype)
    found = _bits(tiled(x, (size,)))
    for order in [rng.permutation(most).tolist(), [most - 1, *range(most - 1)]]:
        if not np.array_equal(found[order], _bits(tiled(x[mx.array(order)], (size,)))):
            return b""
    return found.tobytes()


def _bits(y: mx.array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the bytes of the rows of y, [rows, bytes]."""
    whole: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = np.array(mx.contiguous(y).view(mx.uint8))
    return whole


Function = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Tiles:
    """The sizes of a product's tiles, and whether a gradient goes through it."""

    sizes: tuple[int, ...]
    learns: bool = False

    def apply(self, module: Any, product: Function, x: mx.array) -> mx.array:
        """Return the product for x [..., inputs]."""
        if not self.learns:
            return self._compute(module, product, x)
        # The gradient is the gradient of a single product over all rows.
        own: mx.array = with_gradient_of(partial(self._compute, module, product), product)(x)
        return own

    def _compute(self, module: Any, product: Function, x: mx.array) -> mx.array:
        y = tiled(module, product, x.reshape(-1, x.shape[-1]), self.sizes)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def tiled(module: Any, product: Function, x: mx.array, sizes: Sequence[int]) -> mx.array:
    """Return the product of a module for x [rows, inputs] in tiles of these sizes.

    Where a batch of products is computed one by one, a dense product is one batch, since each further operation of a
    step costs time.
    """
    if not backend.current().products.one_by_one or isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return in_tiles(product, x, sizes)
    weights = module["weight"].T
    if weights.size * -(-len(x) // sizes[-1]) < MOST_NUMBERS:
        y = matmul(x, weights, sizes)
    else:
        y = in_tiles(lambda x: x @ weights, x, sizes)
    return y + module["bias"] if "bias" in module else y


MOST_NUMBERS = 1 << 30
"""Most weights of a batch of products, where a weight counts as often as it is read. MLX's index of them has 31
bits."""


def with_gradient_of(computed: Any, plain: Any) -> Any:
    """Return a function with the result of `computed` and the gradient of `plain`, whose result is nearly the same."""
    function = mx.custom_function(lambda *arrays: computed(*arrays))
    function.vjp(lambda arrays, cotangent, _: _vjp(plain, arrays, cotangent))
    return function


def _vjp(plain: Any, arrays: Any, cotangent: Any) -> Any:
    given = list(arrays) if isinstance(arrays, (tuple, list)) else [arrays]
    _, found = mx.vjp(plain, given, [cotangent])
    return tuple(found)


class TiledLinear:
    """Mixin of a linear that is computed in tiles."""

    _tiles: Tiles

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output."""
        return self._tiles.apply(self, super().__call__, x)  # type: ignore[misc]


class TiledTable:
    """Mixin of an embedding that is also the output head. As the output head it is computed in tiles."""

    _tiles: Tiles

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits for x."""
        return self._tiles.apply(self, super().as_linear, x)  # type: ignore[misc]


class UnsortedSwitch:
    """Mixin of a linear of experts that computes each entry separately, even if the entries are sorted by expert."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the linear's output."""
        y: mx.array = super().__call__(x, indices, sorted_indices=False)  # type: ignore[misc]
        return y


def use_tiles(model: nn.Module, dtype: mx.Dtype) -> list[tuple[int, ...]]:
    """Make all linears of a model, and an embedding that is its output head, compute in tiles; return the sizes.

    Raise ModelError where the device has no size of tiles for one of them.
    """
    found: dict[tuple[Any, ...], Tiles] = {}
    for module in _modules(model):
        if isinstance(module, (SwitchLinear, QuantizedSwitchLinear)):
            mix_in(module, UnsortedSwitch)
            continue
        own: Any = module
        table = isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
        product, inputs = (module.as_linear if table else module), _inputs(module)
        kind = (type(module), own.weight.dtype, own.weight.shape, inputs, "bias" in own)
        if kind not in found:
            found[kind] = Tiles(
                sizes_of(partial(tiled, module, product), inputs, dtype, f"products of {inputs} numbers")
            )
        own._tiles = found[kind]
        mix_in(module, TiledTable if table else TiledLinear)
    return sorted({tiles.sizes for tiles in found.values()})


def let_learn(model: nn.Module) -> None:
    """Let gradients go through the linears of a clone of the model."""
    for module in model.modules():
        own: Any = module
        if isinstance(module, (TiledLinear, TiledTable)):
            own._tiles = replace(own._tiles, learns=True)


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    has_head = any("lm_head" in module for module in model.modules())
    kinds: tuple[type, ...] = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)
    if not has_head:
        kinds += (nn.Embedding, nn.QuantizedEmbedding)
    seen: set[int] = set()
    modules: list[nn.Module] = model.modules()
    for module in modules:
        if isinstance(module, kinds) and id(module) not in seen:
            seen.add(id(module))
            yield module


def _inputs(module: Any) -> int:
    width: int = module.weight.shape[1]
    packed = isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return width * 32 // module.bits if packed else width


DELTA_TOKENS = 8
"""Tokens of a tile of an adapter's products, if such a product gives a row the same bits in every place. Otherwise a
tile has one token."""


@dataclass(frozen=True)
class TiledDeltas:
    """The products of adapters with matrices of one rank, in tiles of tokens of one adapter."""

    rank: int
    tokens: int = DELTA_TOKENS

    @staticmethod
    def of(rank: int, linears: Iterable[LinearShape], dtype: mx.Dtype) -> TiledDeltas:
        """Return the products for linears of these shapes. Tiles have one token if larger ones give other bits."""
        plain = [shape for shape in dict.fromkeys(linears) if not shape.experts]
        for inputs, outputs in dict.fromkeys(
            pair for shape in plain for pair in ((shape.inputs, rank), (rank, shape.outputs))
        ):
            matrix = mx.random.normal((1, inputs, outputs), dtype, key=mx.random.key(0))
            if not keeps_places(partial(_by_one_matrix, matrix), inputs, dtype, DELTA_TOKENS):
                return TiledDeltas(rank, 1)
        return TiledDeltas(rank)

    def __call__(self, x: mx.array, a: mx.array, b: mx.array, slots: mx.array) -> mx.array:
        """Return the deltas [rows, length, outputs] for x [rows, length, inputs], of the slot of each row.

        a: [slots, inputs, rank]; b: [slots, rank, outputs]; slots: uint32 [rows].
        """
        rows, length, inputs = x.shape
        size = self.tokens
        tiles = -(-length // size)
        if tiles * size > length:
            x = mx.pad(x, [(0, 0), (0, tiles * size - length), (0, 0)])
        which = slots if tiles == 1 else mx.repeat(slots, tiles)
        order = mx.arange(rows * tiles, dtype=mx.uint32)
        u = mx.gather_mm(x.reshape(-1, size, inputs), a, lhs_indices=order, rhs_indices=which)
        y = mx.gather_mm(u, b, lhs_indices=order, rhs_indices=which)
        return y.reshape(rows, tiles * size, -1)[:, :length]

    def widened(self, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Return A [..., inputs, r] and B [..., r, outputs] with zeros up to the rank."""
        missing = max(self.rank - a.shape[-1], 0)
        before = [(0, 0)] * (a.ndim - 2)
        return mx.pad(a, [*before, (0, 0), (0, missing)]), mx.pad(b, [*before, (0, missing), (0, 0)])

    def learning(self, x: mx.array, a: mx.array, b: mx.array) -> mx.array:
        """Return the deltas for x [rows, length, inputs], all of one adapter of any rank, with their gradients."""

        def computed(x: mx.array, a: mx.array, b: mx.array) -> mx.array:
            a, b = self.widened(a, b)
            return self(x, a[None], b[None], mx.zeros(x.shape[:1], mx.uint32))

        y: mx.array = with_gradient_of(computed, lambda x, a, b: (x @ a) @ b)(x, a, b)
        return y


def _by_one_matrix(matrix: mx.array, x: mx.array, sizes: Sequence[int]) -> mx.array:
    """Return x @ matrix[0] for x [rows, inputs] in tiles of one size, as adapters' products are computed."""
    tiles = x.reshape(-1, sizes[0], x.shape[-1])
    order, which = mx.arange(len(tiles), dtype=mx.uint32), mx.zeros((len(tiles),), mx.uint32)
    return mx.gather_mm(tiles, matrix, lhs_indices=order, rhs_indices=which).reshape(len(x), -1)
