"""The cache group of recurrent layers, which keep a state of fixed size for each sequence, whatever its length.

A block is one row of state: the state after the last token that the sequence has within the block's positions. A step
writes the state row of the block that it is in. When a block is full, its row is a snapshot at the block's boundary. A
sequence restores a snapshot by beginning the next block after it, without a copy; only a sequence that parts from
another within a block copies that block's row. A state cannot be cut back to fewer tokens, so a VERIFY row gets a state
row for each of its drafts, and rolling back means keeping the state row of the last accepted draft.
"""

from __future__ import annotations

from mlx_tandem.kv.groups.table import Table
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window


class StateGroup(WindowGroup):
    """The group of recurrent layers. A position needs the state after the position before it: a window of two.

    For a row of tokens at `start`, a runner reads the state in block (start - 1) // block_size of the row's table, and
    writes the state at the end of each block that the tokens fill and after the last token. The table of a VERIFY row
    ends with a block for each draft; the state after its first token goes to the block of `start`.
    """

    divides = False
    floats = False  # each draft has a state row, and the host says which of them the next row continues

    def __init__(self, pool: BlockPool, row: int, block_bytes: int = 0):
        super().__init__(pool, Window(2, row), block_bytes)

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        """Return `drafts`: each draft has a state row of its own."""
        return drafts

    def take_drafts(self, table: Table, start: int, drafts: int) -> tuple[Table, Table]:
        """Return the table unchanged, and a block for the state after each draft."""
        assert len(table) == start // self._size + 1
        return table, tuple(self._allocate(drafts))

    def truncate(self, table: Table, spare: Table, start: int, positions: int) -> Table:
        """Return the table with the states at block boundaries and after the last accepted token; release the rest."""
        kept = list(table)
        unused = list(spare)
        for block in range(start // self._size, (positions - 1) // self._size + 1):
            last = min((block + 1) * self._size, positions) - 1
            if last == start:
                continue
            row = spare[last - start - 1]
            unused.remove(row)
            if block < len(kept):
                unused.append(kept[block])
                kept[block] = row
            else:
                kept.append(row)
        self.pool.release(unused)
        return tuple(kept)
