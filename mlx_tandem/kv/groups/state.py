"""The cache group of recurrent layers, which keep a state of fixed size for each sequence, whatever its length.

A block is one row of state: the state after the last token that the sequence has within the block's positions. A table
has SCRATCH for blocks whose state nobody needs, so a sequence holds a few rows, however long it is. When a block is
full, its row is a snapshot at the block's boundary. A sequence restores a snapshot by beginning the next block after
it, without a copy; only a sequence that parts from another within a block copies that block's row. A state cannot be
cut back to fewer tokens, so a step that verifies drafts keeps the states after each of its tokens until it knows how
many drafts are accepted, and then writes only those after accepted tokens. Rejected drafts leave nothing in the pool.
"""

from __future__ import annotations

from collections.abc import Collection

from mlx_tandem.kv.groups.table import Table, TableGroup
from mlx_tandem.kv.pool import SCRATCH

HELD = 2
"""Rows that a sequence needs to go on: the one that a step reads, and the one that it writes."""

MOST_DRAFTS = 7
"""Most drafts of a row. Recurrent layers compute its tokens one after another, and the states after each are in memory
until the step has drawn."""


class StateGroup(TableGroup):
    """The group of recurrent layers. A position needs the state after the position before it.

    For a row of tokens at `start`, a runner reads the state in block (start - 1) // block_size of the row's table, and
    writes the state after the row's last token into the block of that token. A row that begins within a block ends in
    it at the latest, so every state but the newest is one at the end of its block. A VERIFY row may go on into further
    blocks: each block with accepted tokens gets the state after the last of them, and other blocks stay as they are.
    """

    divides = False
    most_drafts = MOST_DRAFTS
    keeps_all = False
    snapshots = True

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence, unbounded where the pool has the rows of one."""
        return 1 << 62 if self.pool.usable_blocks >= HELD else self._size

    def first_needed(self, position: int) -> int:
        """Return the block with the state before `position`."""
        return max(position - 1, 0) // self._size

    def end_at_begin(self, known: int, tokens: int) -> int:
        """Return the block of position `known`: a sequence that begins gets no row before its first step."""
        return known // self._size

    def lacks(self, table: Table, positions: int) -> int:
        """Return 1 if the table ends before so many positions, else 0: only the last block needs a row."""
        return min(super().lacks(table, positions), 1)

    def take(self, table: Table, positions: int) -> Table:
        """Return the table with a row for the state after so many positions."""
        missing = super().lacks(table, positions)
        return (*table, *[SCRATCH] * (missing - 1), *self._allocate(1)) if missing else table

    def give_back(self, table: Table, computed: int, kept: Collection[int] = ()) -> tuple[Table, Table]:
        """Return the table with SCRATCH for the rows before that of the last full block, and these rows.

        A sequence that continues from the end of the last full block finds its state there. The rows of the blocks
        whose end is one of `kept`, counted in blocks, stay as well.
        """
        end = self.first_needed(computed // self._size * self._size)
        gone = [i for i in range(end) if table[i] != SCRATCH and i + 1 not in kept]
        if not gone:
            return table, ()
        rest = list(table)
        for i in gone:
            rest[i] = SCRATCH
        return tuple(rest), tuple([table[i] for i in gone])
