"""Routes from the rows of a step to their adapters, as arrays of numbers made before the step and read while it is
traced.

A step whose rows all use one adapter takes that slot's own arrays and multiplies plainly. Otherwise `gather_mm` runs
a list of (rows of x, matrix) pairs. Small models pay about a microsecond for every node of the graph, views too, so
each node was counted: docs/decisions/lora-delta.md has the measurements.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.model.inputs import Numbers

Ints = npt.NDArray[np.int64]

WINDOW = 8
"""Rows of a window. A BLAS takes hardly longer for 8 rows than for one."""
WINDOWS_FROM = 24
"""Rows of a step from which windows are worth the nodes that they add to the graph."""

TILE = 8
"""Most tokens of a tile: a fused kernel uses each number of an adapter that it loads for all tokens of the tile."""


class Layout(NamedTuple):
    """The static half of a step's route, which is part of the key of a compiled step.

    `kind` is "base" if no row has an adapter, "uniform" if all rows have the same, and "rows" if each row has its
    own. "windows" is like "rows", but A is applied to `pieces` windows of WINDOW neighbouring rows, each for the
    rows of one adapter in it. "tiles" is like "rows", but the `tokens` are cut into `pieces` tiles for fused
    kernels.
    """

    kind: Literal["base", "uniform", "rows", "windows", "tiles"]
    rows: int = 0
    pieces: int = 0
    tokens: int = 0


class Windows(NamedTuple):
    """Windows of neighbouring rows, all uint32: first row [count] and slot [count] of each window, and each row's
    place `back` [rows].
    """

    first: mx.array
    owner: mx.array
    back: mx.array


class Ids(NamedTuple):
    """The arrays that `lay_out` packed into one."""

    slots: mx.array
    """[rows]; unused if the layout is uniform."""

    order: mx.array
    """[rows]: 0, 1, 2 …; without it gather_mm would make it again at every call."""

    windows: Windows | None = None
    tiles: mx.array | None = None
    """int32 [pieces, 3]: first token, number of tokens (0: padding) and slot of each tile."""


def lay_out(slots: Ints, length: int, *, windows: bool = False, tiles: bool = False) -> tuple[Layout, Numbers | None]:
    """Return the layout of a step whose row i uses `slots[i]` (0: base) for `length` tokens, and its packed ids.

    The ids have one axis and are int32 for tiles, else uint32; None for the base. `windows` allows windows, `tiles`
    asks for tiles.
    """
    if not slots.any():
        return Layout("base"), None
    rows = len(slots)
    parts = [slots, np.arange(rows)]
    if tiles:
        cut = cut_tiles(slots, length)
        packed = np.concatenate([*parts, cut.reshape(-1)]).astype(np.int32)
        return Layout("tiles", rows, len(cut), rows * length), packed
    if (slots == slots[0]).all():
        return Layout("uniform"), slots[:1].astype(np.uint32)
    layout = Layout("rows", rows)
    if windows and length == 1 and rows >= WINDOWS_FROM:
        found = cut_windows(slots)
        if found is not None:
            layout = Layout("windows", rows, len(found[0]))
            parts += found
    return layout, np.concatenate(parts).astype(np.uint32)


def read(ids: mx.array, layout: Layout) -> Ids:
    """Return the parts of the ids that `lay_out` packed for this layout."""
    kind, rows, count = layout.kind, layout.rows, layout.pieces
    if kind == "uniform":
        return Ids(ids, ids)
    if kind == "tiles":
        slots, order = (part.view(mx.uint32) for part in (ids[:rows], ids[rows : 2 * rows]))
        return Ids(slots, order, tiles=ids[2 * rows :].reshape(count, 3))
    windows = None
    if kind == "windows":
        rest = ids[2 * rows :]
        windows = Windows(rest[:count], rest[count : 2 * count], rest[2 * count :])
    return Ids(ids[:rows], ids[rows : 2 * rows], windows)


def cut_windows(slots: Ints) -> tuple[Ints, Ints, Ints] | None:
    """Cut rows into windows of WINDOW neighbouring rows such that every row lies in a window of its own slot.

    Return the first row and the slot of each window, and for each row window * WINDOW + its place in it; None if
    there would be too many windows to be worth it. Their number is rounded up, so that a batch that changes a little
    keeps its compiled step.
    """
    rows = len(slots)
    first: list[int] = []
    owner: list[int] = []
    back = np.zeros(rows, np.int64)
    current: dict[int, int] = {}  # slot -> its last window
    for row, slot in enumerate(slots.tolist()):
        w = current.get(slot)
        if w is None or row - first[w] >= WINDOW:
            w = current[slot] = len(first)
            first.append(min(row, rows - WINDOW))
            owner.append(slot)
        back[row] = w * WINDOW + row - first[w]
    step = max(rows // 16, 1)
    count = -(-len(first) // step) * step
    if count * 2 > rows:
        return None
    pad = count - len(first)
    return np.array(first + [0] * pad), np.array(owner + [0] * pad), back


def cut_tiles(slots: Ints, length: int) -> Ints:
    """Return tiles [count, 3] that cover every token once: first token, number of tokens, slot.

    Each tile has at most TILE neighbouring tokens of one slot. The count is the least that so many tokens may need,
    or that number doubled a few times, so that a batch that changes a little keeps its compiled step; the tiles left
    over have no tokens.
    """
    starts = np.flatnonzero(np.diff(slots, prepend=-1)) * length
    ends = np.append(starts[1:], len(slots) * length)
    counts = -(-(ends - starts) // TILE)
    run = np.repeat(np.arange(len(starts)), counts)
    within = np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)
    first = starts[run] + within * TILE
    size = -(-len(slots) * length // TILE)
    while size < len(first):
        size *= 2
    tiles = np.zeros((size, 3), np.int64)
    tiles[: len(first)] = np.stack([first, np.minimum(ends[run] - first, TILE), slots[first // length]], 1)
    return tiles
