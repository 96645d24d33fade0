"""The paged KV cache as mlx-lm's own model modules see it: one cache object a layer, arrays of the whole pool.

A layer's keys live in arrays [kv_heads · blocks · block_size, width], head-major: the run of one head's block is
contiguous, which a gather reads ten times faster on a CPU than token-major. The layer's own code calls
`update_and_fetch`, which writes into the pool and returns the keys and values of the rows' block tables. What a row of
an array is made of is in `kvformat.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.kv.pool import first_block
from mlx_tandem.model.attention import portable
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.inplace import after, write, zero_of
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.paged_attention import EVERYTHING, MOST_QUERIES, PagedAttention
from mlx_tandem.model.kernels.rotary import Rotary
from mlx_tandem.model.step.shapes import EXACT_ROWS


@dataclass(frozen=True, slots=True)
class Asks:
    """How a layer's own code asks for attention, where it does so through `attend`."""

    heads: int  # of queries
    sinks: bool


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer caches: heads and widths of keys and of values differ in latent attention. `window`: how many
    positions it sees, the last of them the query's own; None: all.
    """

    keys: RowFormat
    values: RowFormat
    asks: Asks | None = None
    window: int | None = None

    @property
    def halves(self) -> tuple[RowFormat, RowFormat]:
        return self.keys, self.values

    def bytes_per_token(self) -> int:
        return sum(half.bytes_per_token() for half in self.halves)

    def quantised(self, bits: int, group: int) -> LayerShape:
        """The same layer with its keys and values in so many bits."""
        keys, values = (replace(half, bits=bits, group=group) for half in self.halves)
        return replace(self, keys=keys, values=values)


class Turn(NamedTuple):
    """How heads are rotated by their position."""

    dims: int
    base: float
    scale: float


class LayerKernels(NamedTuple):
    """Fused kernels for a layer of one shape."""

    attention: PagedAttention
    rotary: Rotary


class StepView:
    """What all layers of one pool share in one forward of a rectangle of rows [rows, length].

    offset: [rows] int32, the position of each row's first token; slots: [rows, length] int32, where in a head's run
    each token goes; tables: [rows, blocks] int32; in_place: or instead of tables, the (first, last) block of the one
    row, whose blocks are contiguous, so that its keys are read where they are.

    level: where all rows begin at this one position and none is read beyond its own tokens. The keys are then just
    those before it and the new ones as they were computed, and the mask is "causal", which fused attention is fastest
    with.

    kept: of a pool whose layers all see a window, the longest of these. The tables begin with the block of the first
    position that a row's first token sees through it, max(offset + 1 - kept, 0) // block_size in its sequence, and so
    do keys, values and masks.

    pause: the layers after which the device is waited for, 0: it never is. MLX keeps what every operation reads until
    the graph with it is done, and the host hands out a whole forward long before: of a long chunk all layers' numbers
    would be there at once. Not for a forward that is traced.

    mask_axes: axes of a mask between rows and queries: 1, or 2 for families that group queries by KV head. Indices and
    masks are made by the first layer that asks and shared by the others.
    """

    def __init__(
        self,
        offset: mx.array,
        slots: mx.array,
        tables: mx.array,
        *,
        num_blocks: int,
        block_size: int,
        mask_axes: int,
        kept: int | None = None,
        in_place: tuple[int, int] | None = None,
        level: int | None = None,
        pause: int = 0,
    ):
        self.offset = offset
        self.tables = tables
        self.kept = kept
        self.in_place = in_place
        self.level = level
        self.block_size = block_size
        self.slots = slots
        self._pause = pause
        self._layers = 0
        self._num_blocks = num_blocks
        self._mask_axes = mask_axes
        self._blocks = in_place[1] - in_place[0] if in_place else tables.shape[1]
        self._real: mx.array | None = None
        self._angles: dict[Turn, tuple[mx.array, mx.array]] = {}
        self._writes: dict[int, mx.array] = {}
        self._runs: dict[int, mx.array] = {}
        self._masks: dict[tuple[int, int | None], mx.array] = {}

    def mask(self, length: int, window: int | None) -> mx.array:
        """[rows, 1 (, 1), length, positions] bool: each query sees what is not after it (nor before its window)."""
        made = self._masks.get((length, window))
        if made is None:
            key = arange(self._blocks * self.block_size)
            if self.level is not None:
                key = arange(self.level + length)[self.level_first :]
            elif self.kept is not None:
                first = mx.maximum(self.offset + (1 - self.kept), 0) // self.block_size
                key = first[:, None, None] * self.block_size + key
            query = self.offset[:, None, None] + arange(length)[None, :, None]
            made = key <= query
            if window is not None:
                made = made & (key > query - window)
            made = mx.expand_dims(made, tuple(range(1, 1 + self._mask_axes)))
            self._masks[length, window] = made
        return made

    @property
    def level_first(self) -> int:
        """The first position that is read, where all rows begin at one."""
        assert self.level is not None
        return first_block(self.level, self.kept, self.block_size) * self.block_size

    def window(self, mask: mx.array | str | None) -> int | None:
        """That of a mask which `mask` has made; None for any other."""
        return next((window or EVERYTHING for (_, window), made in self._masks.items() if made is mask), None)

    def real(self) -> mx.array:
        """[rows, 1, length, 1] bool: which positions are not padding. Padding goes to the first block, the scratch."""
        if self._real is None:
            self._real = (self.slots >= self.block_size)[:, None, :, None]
        return self._real

    def angles(self, turn: Turn) -> tuple[mx.array, mx.array]:
        """Cosines and sines [rows, 1, length, dims / 2], float32."""
        if turn not in self._angles:
            half = turn.dims // 2
            frequency = np.exp2(np.arange(half) / -half * np.log2(turn.base)).astype(np.float32)
            position = (self.offset[:, None] + arange(self.slots.shape[1])).astype(mx.float32) * turn.scale
            angle = position[:, None, :, None] * mx.array(frequency)
            self._angles[turn] = mx.cos(angle), mx.sin(angle)
        return self._angles[turn]

    def arrive(self, x: mx.array) -> None:
        """Each layer's call with something that it has computed."""
        self._layers += 1
        if self._pause and self._layers % self._pause == 0:
            mx.eval(x)

    def writes(self, heads: int) -> mx.array:
        """[rows · heads · length]: the pool's rows that the new keys or values of a layer with so many heads go to."""
        if heads not in self._writes:
            head = arange(heads)[:, None] * (self._num_blocks * self.block_size)
            self._writes[heads] = (self.slots[:, None] + head).reshape(-1)
        return self._writes[heads]

    def runs(self, heads: int) -> mx.array:
        """[rows, heads, blocks]: the pool's runs of one block that the rows read."""
        if heads not in self._runs:
            self._runs[heads] = self.tables[:, None] + arange(heads)[:, None] * self._num_blocks
        return self._runs[heads]


@lru_cache(maxsize=1024)
def arange(n: int) -> mx.array:
    """0 … n - 1, int32, evaluated: a constant of whatever graph uses it, made once."""
    return mx.array(np.arange(n, dtype=np.int32))


class PagedCache:
    """One layer's share of the pool, bound anew for each forward: arrays are arguments of the step, never captured."""

    def __init__(self, shape: LayerShape, fused: LayerKernels | None = None):
        self.shape = shape
        self._fused = fused
        self._arrays: list[mx.array] = []
        self._view: StepView | None = None
        self._fetched: tuple[mx.array, ...] = ()
        self._after: list[mx.array] = []  # zeros that came with the last write

    def bind(self, arrays: Sequence[mx.array], view: StepView) -> None:
        """`arrays`: those of the lines of keys, then of values."""
        self._arrays, self._view = list(arrays), view

    def release(self) -> list[mx.array]:
        """The pool after the forward. The cache keeps no reference: the next write must find itself alone."""
        arrays, self._arrays, self._view, self._fetched, self._after = self._arrays, [], None, (), []
        return arrays

    # what mlx-lm's modules call

    @property
    def offset(self) -> mx.array:
        assert self._view is not None
        return self._view.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | str:
        assert self._view is not None
        level = self._view.level
        window = self.shape.window if window_size is None else window_size
        if level is not None and not return_array and (window is None or level + N <= window):
            return "causal"
        return self._view.mask(N, window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write [rows, heads, length, dim] and return [rows, heads, positions, dim] of all that the rows may see."""
        assert self._view is not None
        self._view.arrive(keys)
        halves = self._halves()
        self._arrays, self._after = [], []
        k, v = (
            self._update(form, pool, new)
            for form, pool, new in zip(self.shape.halves, halves, (keys, values), strict=True)
        )
        self._arrays = [*halves[0], *halves[1]]
        self._fetched = k, v
        return k, v

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Where the hook sends the layer's attention. Few queries over just what was fetched, under one of this step's
        own masks, are answered from the pool, and what was to be gathered for them never is.
        """
        v = self._view
        assert v is not None
        fetched = len(self._fetched) == 2 and keys is self._fetched[0] and values is self._fetched[1]
        if self._fused is not None and fetched and queries.shape[2] <= MOST_QUERIES:
            window = v.window(mask)
            if window is not None and queries.dtype == self.shape.keys.dtype:
                attention, tables = self._fused.attention, after(self._after, v.tables)
                return attention(
                    queries, self._arrays, tables, v.offset, scale, window=window, kept=v.kept, sinks=sinks
                )
        return portable.attend(queries, keys, values, scale, mask, sinks)

    # what a block that takes the short way calls instead

    def offers(self, x: mx.array, mask: mx.array | str | None) -> bool:
        """Whether `attend_products` is to be had for a block's input x [rows, length, …] under this mask."""
        v = self._view
        if v is None or self._fused is None or x.dtype != self.shape.keys.dtype:
            return False
        if x.shape[1] <= MOST_QUERIES:
            return v.window(mask) is not None
        return v.level is not None and isinstance(mask, str)

    def attend_products(
        self,
        products: Sequence[mx.array],
        turn: Turn,
        norms: tuple[mx.array, mx.array, float] | None,
        *,
        scale: float,
        mask: mx.array | str | None,
    ) -> mx.array:
        """From the products of q, k and v, as `Rotary` takes them, to attention [rows, length, heads · dim]; the keys
        and values are put into the pool on the way.
        """
        v, fused = self._view, self._fused
        assert v is not None
        assert fused is not None
        v.arrive(products[0])
        few = products[0].shape[1] <= MOST_QUERIES
        queries, keys, values = fused.rotary(
            products, v.angles(turn), v.slots, self._arrays, norms=norms, fetched=not few
        )
        if few:
            window = v.window(mask)
            assert window is not None
            out = fused.attention(queries, self._arrays, v.tables, v.offset, scale, window=window, kept=v.kept)
        else:
            if v.level:
                zeros = [zero_of([queries])] if inplace.writing().by_outputs else []
                keys, values = (
                    mx.concatenate([self._before(form, pool, v, zeros), new], axis=2)
                    for form, pool, new in zip(self.shape.halves, self._halves(), (keys, values), strict=True)
                )
            out = portable.attend(queries, keys, values, scale, mask, None)
        rows, heads, length, dim = out.shape
        return out.swapaxes(1, 2).reshape(rows, length, heads * dim)

    def _halves(self) -> tuple[list[mx.array], list[mx.array]]:
        """The arrays of keys, and those of values."""
        between = len(self.shape.keys.lines())
        return self._arrays[:between], self._arrays[between:]

    def _update(self, form: RowFormat, pool: list[mx.array], new: mx.array) -> mx.array:
        """Returns what the pool holds now, of the new tokens too: it must not matter how a prompt was cut."""
        v = self._view
        assert v is not None
        if new.shape[2] > 1 or new.shape[0] > EXACT_ROWS:
            # Padding behind a token that is not finite is not finite either, nor is a row of padding under an adapter
            # that overflows, and in the scratch block it would reach every row: a masked weight of 0 times NaN is NaN.
            new = mx.where(v.real(), new, 0)
        writes = v.writes(form.heads)
        encoded = form.encode(new.reshape(-1, form.dim))
        written = [write(array, writes, lines) for array, lines in zip(pool, encoded, strict=True)]
        pool[:] = [array for array, _ in written]
        zeros = [zero for _, zero in written if zero is not None]
        self._after += zeros
        if v.level is None:
            return form.decode([self._seen(array, form.heads, v, zeros) for array in pool])
        own = form.decode([lines.reshape(*new.shape[:3], -1) for lines in encoded])
        by_outputs = inplace.writing().by_outputs
        if by_outputs:
            own = after(zeros, own)  # so that the part's outputs are made of what was written
        elif zeros:  # nothing else asks for what was written
            own = mx.depends(own, zeros)
        if v.level == 0:
            return own
        return mx.concatenate([self._before(form, pool, v, zeros if by_outputs else ()), own], axis=2)

    def _before(self, form: RowFormat, pool: Sequence[mx.array], v: StepView, zeros: Sequence[mx.array]) -> mx.array:
        """Keys or values of the positions before a level chunk, read after what gave these zeros."""
        assert v.level is not None
        seen = v.level - v.level_first
        return form.decode([self._seen(array, form.heads, v, zeros)[:, :, :seen] for array in pool])

    @staticmethod
    def _seen(array: mx.array, heads: int, v: StepView, zeros: Sequence[mx.array]) -> mx.array:
        """[rows, heads, positions, width] of an array of the pool, as it is after what gave these zeros."""
        width = array.shape[1]
        if v.in_place is not None:
            first, last = v.in_place
            return array.reshape(heads, -1, width)[None, :, first * v.block_size : last * v.block_size]
        runs = after(zeros, v.runs(heads))
        rows, _, blocks = runs.shape
        gathered = array.reshape(-1, v.block_size * width)[runs]
        return gathered.reshape(rows, heads, blocks * v.block_size, width)


class ProbeCache:
    """Stands in for a cache in a forward that is never evaluated, to learn what a layer writes."""

    offset = 0

    def __init__(self) -> None:
        self.shape: LayerShape | None = None
        self.windows: set[int] = set()

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> str | None:
        if window_size is not None:
            self.windows.add(window_size)
        return None

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | None,
        sinks: mx.array | None,
    ) -> mx.array:
        assert self.shape is not None
        self.shape = replace(self.shape, asks=Asks(queries.shape[1], sinks is not None))
        return portable.attend(queries, keys, values, scale, mask, sinks)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys_form, values_form = (RowFormat(new.shape[1], new.shape[3], new.dtype) for new in (keys, values))
        self.shape = LayerShape(keys_form, values_form)
        return keys, values
