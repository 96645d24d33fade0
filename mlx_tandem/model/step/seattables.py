"""The block tables of all seats in one array, from which the tables of a step are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_tandem.model.inputs import Numbers


class SeatTables:
    """The tables of `num_seats` seats in one pool, and of one more seat, the last, for padded rows.

    Padded rows have only the scratch block. Outside this class, the pool's blocks are numbered from `first` on, and in
    it from 0 on. A table that has not changed since the last step is the same object, so that most steps change
    nothing.
    """

    def __init__(self, num_seats: int, first: int = 0):
        self._first = first
        self._blocks = np.zeros((num_seats + 1, 8), np.int32)
        self._known: list[tuple[int, ...]] = [()] * (num_seats + 1)  # each table as `learn` was given it
        self.generation = 0
        """Number that changes whenever a table changes."""

    def forget(self, seat: int) -> None:
        """Empty the table of a seat that has a new owner."""
        self._blocks[seat] = 0
        self._known[seat] = ()
        self.generation += 1

    def learn(self, seats: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Take in the present tables of these seats."""
        known = self._known
        for seat, new in zip(seats, tables, strict=True):
            before = known[seat]
            if new is before or (table := tuple(new)) == before:
                continue
            end = len(table)
            same = len(before) if table[: len(before)] == before else 0  # mostly the table has grown
            self._widen(end)
            self._blocks[seat, same:end] = table[same:]
            self._blocks[seat, same:end] -= self._first
            self._blocks[seat, end : len(before)] = 0
            known[seat] = table
            self.generation += 1

    def cut(self, seats: Sequence[int], width: int, begin: Numbers | None = None) -> Numbers:
        """Return [seats, width] int32: the blocks of each table from its first on, or from `begin` [seats] on.

        The scratch block follows after the end of a table.
        """
        if begin is None:
            self._widen(width)
            return np.take(self._blocks[:, :width], seats, axis=0)
        self._widen(int(begin.max()) + width)
        cut: Numbers = self._blocks[np.array(seats)[:, None], begin[:, None] + np.arange(width)]
        return cut

    def _widen(self, blocks: int) -> None:
        """Make room for tables of so many blocks."""
        seats, width = self._blocks.shape
        if blocks > width:
            wider = np.zeros((seats, max(blocks, 2 * width)), np.int32)
            wider[:, :width] = self._blocks
            self._blocks = wider
