"""How the rows of a step reach their adapters, as numbers: laid out before the step, read again while it is traced.

A step whose rows all use one adapter takes that slot's own arrays and multiplies plainly. Otherwise `gather_mm` runs
a list of (rows of x, matrix) pairs. Small models pay about a microsecond for every node of the graph, views too, so
each node was counted: `docs/decisions/lora-delta.md` has the measurements.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

WINDOW = 8
"""Rows of a window: a BLAS takes hardly longer for 8 rows than for one."""
WINDOWS_FROM = 24
"""Rows of a step from which windows are worth the nodes that they add."""


class Layout(NamedTuple):
    """The static half of a step's route: part of the key of a compiled step.

    kind: "base", no row has an adapter; "uniform", all rows have the same; "rows", each row has its own; "windows",
    too, but A is applied to `windows` windows of WINDOW neighbouring rows, each for the rows of one adapter in it.
    """

    kind: Literal["base", "uniform", "rows", "windows"]
    rows: int = 0
    windows: int = 0


class Windows(NamedTuple):
    """All uint32. `first`, `owner` [count]: first row and slot of each window. `back` [rows]: each row's place."""

    first: mx.array
    owner: mx.array
    back: mx.array


class Ids(NamedTuple):
    """What `lay_out` packed into one array."""

    slots: mx.array  # [rows]; unused when uniform
    order: mx.array  # [rows]: 0, 1, 2 …; gather_mm makes its own at every call when it gets none
    windows: Windows | None


def lay_out(slots: Ints, length: int, *, windows: bool) -> tuple[Layout, mx.array | None]:
    """The layout of a step whose row i uses `slots[i]` (0: base) for `length` tokens, and its ids (uint32, one axis;
    None for the base). `windows`: they may be used."""
    if not slots.any():
        return Layout("base"), None
    if (slots == slots[0]).all():
        return Layout("uniform"), mx.array([int(slots[0])], mx.uint32)
    rows = len(slots)
    layout = Layout("rows", rows)
    parts = [slots, np.arange(rows)]
    if windows and length == 1 and rows >= WINDOWS_FROM:
        cut = cut_windows(slots)
        if cut is not None:
            layout = Layout("windows", rows, len(cut[0]))
            parts += cut
    return layout, mx.array(np.concatenate(parts).astype(np.uint32))


def read(ids: mx.array, layout: Layout) -> Ids:
    kind, rows, count = layout
    if kind == "uniform":
        return Ids(ids, ids, None)
    windows = None
    if kind == "windows":
        rest = ids[2 * rows :]
        windows = Windows(rest[:count], rest[count : 2 * count], rest[2 * count :])
    return Ids(ids[:rows], ids[rows : 2 * rows], windows)


def cut_windows(slots: Ints) -> tuple[Ints, Ints, Ints] | None:
    """Windows of WINDOW neighbouring rows such that every row lies in one of its own slot.

    (first row, slot) of each window, and per row window * WINDOW + its place in it; None when there would be too many
    to be worth it. The number is rounded up, so that a batch that changes a little keeps its compiled step.
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
