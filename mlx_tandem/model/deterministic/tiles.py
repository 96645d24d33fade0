"""Products in tiles of rows: the bits of a row's result do not depend on which rows are beside it, or on how many.

A library for matrix products chooses the order of sums by the number of rows, and some libraries choose it by a row's
place, too. So rows are cut into tiles whose sizes give equal bits, and a tile with missing rows is filled with rows of
zeros. A check at start finds these sizes for each product, on the device and with the number of threads that will
serve. It uses random numbers, since the order of sums does not depend on the numbers that are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend

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
