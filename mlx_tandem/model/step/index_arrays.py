"""The numbers that tell a forward where its rows are: tokens, positions, places in the pool and tables of blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlx_tandem.engine.plan import Row
from mlx_tandem.kv.pool import first_block
from mlx_tandem.model.cache.turns import TurnNumbers, TurnShape, turn_numbers
from mlx_tandem.model.inputs import Numbers, constant, padded


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


KEPT_ARRAYS = 64
"""Most constant arrays of sets of rows that are kept: tables, tokens, seats."""


class IndexArrays:
    """The index arrays of rows in all pools of a model, which are made anew only where rows or tables have changed.

    `firsts` are each pool's first block, and `windows` the longest window of the layers of each pool of keys and
    values; None: they see everything. A model with states has one more pool.
    """

    def __init__(self, num_seats: int, block_size: int, firsts: Sequence[int], windows: Sequence[int | None]):
        self._padding = num_seats
        self.block_size = block_size
        self._firsts = firsts
        self._windows = windows
        self._tables = [SeatTables(num_seats, first) for first, _ in zip(firsts, windows, strict=False)]
        self.keeps_states = len(firsts) > len(windows)
        self._cached: dict[Any, Numbers] = {}  # constants of the present sets of rows

    def forget(self, seat: int) -> None:
        """Forget the tables of a seat that has a new owner."""
        for tables in self._tables:
            tables.forget(seat)

    def clear(self) -> None:
        """Drop all constants."""
        self._cached.clear()

    def once(self, key: Any, make: Callable[[], Numbers]) -> Numbers:
        """Return numbers that depend only on which rows run; `make` is called when these change."""
        found = self._cached.get(key)
        if found is None:
            if len(self._cached) > KEPT_ARRAYS:
                self._cached.clear()
            found = self._cached[key] = constant(make())
        return found

    def of(
        self, rows: list[Row], count: int, length: int, widths: Sequence[int], floats: bool
    ) -> tuple[Numbers, Numbers, list[Numbers], Numbers]:
        """Return tokens [rows, length], offset [rows], places and last [rows], the index of each row's last token.

        Places are the slot mapping [rows, length] and the tables [rows, width] of each pool, or where a row `floats`
        the first block [rows] of each row's table instead of the slot mapping.
        """
        pads = [0] * (count - len(rows))
        offset = np.array([r.start for r in rows] + pads, np.int32)
        lengths = np.array([len(r.tokens) for r in rows] + pads, np.int32) if length > 1 else None
        seats = [r.seat for r in rows]
        places: list[Numbers] = []
        for pool, width in enumerate(widths):
            self._tables[pool].learn(seats, [r.tables[pool] for r in rows])
            if floats:
                least = offset.copy()
                least[: len(rows)] -= np.array([r.slack for r in rows], np.int32)
                places += self._cut_tables(seats, pool, least, width)
            elif lengths is None:
                _, tables = self._cut_tables(seats, pool, offset, width)
                places += np.array(self._slots(rows, pool) + pads, np.int32)[:, None], tables
            else:
                places += self._places(seats, pool, offset, lengths, length, width)
        if lengths is None:
            ids = [r.tokens[0] for r in rows] + pads
            tokens = self.once(("tokens", tuple(ids)), lambda: np.array(ids, np.int32)[:, None])
            return tokens, offset, places, self.once(("zeros", count), lambda: np.zeros(count, np.int32))
        tokens = padded([r.tokens for r in rows], count, length)
        return tokens, offset, places, np.maximum(lengths - 1, 0)

    def states(self, rows: Sequence[Row], count: int) -> list[Numbers]:
        """Return the lines of the rows' states, as `Operands` has them. All rows begin, or none does."""
        bs, first, pads = self.block_size, self._firsts[-1], [0] * (count - len(rows))
        lines = [[r.tables[-1][(r.start - 1) // bs] - first for r in rows] + pads] if rows[0].start else []
        lines.append([r.tables[-1][(r.start + len(r.tokens) - 1) // bs] - first for r in rows] + pads)
        return [np.array(each, np.int32) for each in lines]

    def turns(self, rows: Sequence[Row], count: int, tokens: int) -> tuple[TurnShape, TurnNumbers]:
        """Return the numbers of the turns in which recurrent layers compute these rows, as `turn_numbers` does."""
        return turn_numbers(rows, count, tokens, self.block_size, self._firsts[-1], self._padding)

    def _slots(self, rows: Sequence[Row], pool: int) -> list[int]:
        """Return the slot of each row's first token. For rows of one token this is faster than NumPy's indexing."""
        size, begin = self.block_size, self._firsts[pool]
        return [(r.tables[pool][r.start // size] - begin) * size + r.start % size for r in rows]

    def _places(
        self,
        seats: list[int],
        pool: int,
        offset: Numbers,
        lengths: Numbers,
        length: int,
        width: int,
    ) -> tuple[Numbers, Numbers]:
        """Return the slot mapping [rows, length] and the tables [rows, width] in one pool."""
        bs = self.block_size
        first, tables = self._cut_tables(seats, pool, offset, width)
        position = offset[:, None] + np.arange(length, dtype=np.int32)
        real = np.arange(length) < lengths[:, None]
        block = np.where(real, position // bs - first[:, None], 0)
        slots = np.where(real, np.take_along_axis(tables, block, 1) * bs + position % bs, position % bs)
        return slots.astype(np.int32), tables

    def _cut_tables(self, seats: list[int], pool: int, offset: Numbers, width: int) -> tuple[Numbers, Numbers]:
        """Return the first block [rows] that a token at `offset` sees, and the tables [rows, width] from it on."""
        bs, window, rows = self.block_size, self._windows[pool], len(offset)
        own = self._tables[pool]
        padded_seats = seats + [self._padding] * (rows - len(seats))
        if window is None:
            first, begun = self.once(("zeros", rows), lambda: np.zeros(rows, np.int32)), None
            key = ("tables", pool, own.generation, rows, width, tuple(seats), ())
        else:
            first = begun = np.maximum(offset + (1 - window), 0) // bs
            key = ("tables", pool, own.generation, rows, width, tuple(seats), tuple(first.tolist()))
        return first, self.once(key, lambda: own.cut(padded_seats, width, begun))

    def table(self, row: Row, pool: int, blocks: int) -> list[int]:
        """Return the first `blocks` of the row's block table that its window can see, by their numbers in the pool."""
        window, begin = self._windows[pool], self._firsts[pool]
        first = first_block(row.start, window, self.block_size)
        table = row.tables[pool][first : first + blocks]
        return [b - begin for b in table]
