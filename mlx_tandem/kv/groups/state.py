"""Layers that keep a state of fixed size for each sequence, as recurrent ones do, whatever its length.

A block is one row of state: that behind the last token which the sequence has in the block's positions. Steps write the
row of the block that they are in, and each row that they leave full is a snapshot at a block's boundary. Restoring one
is to begin the next block behind it, without a copy; only a sequence that parts from another within a block copies the
row of that block. A row cannot be cut back to fewer tokens, so a VERIFY row gets a row of state for each of its drafts,
and rolling back is to keep that of the last accepted one.
"""

from __future__ import annotations

from mlx_tandem.kv.groups.table import Table
from mlx_tandem.kv.groups.window import WindowGroup
from mlx_tandem.kv.pool import BlockPool, Window


class StateGroup(WindowGroup):
    """Rows of state. What a position needs is the row behind the one before it: a window of two positions.

    A runner finds the source of a row of tokens at `start` in block (start - 1) // block_size of its table, and writes
    the state behind each of the blocks that the tokens end or leave. The table of a VERIFY row ends with a block for
    each draft; the state behind its first token goes to the block of `start`.
    """

    divides = False

    def __init__(self, pool: BlockPool, row: int, block_bytes: int = 0):
        super().__init__(pool, Window(2, row), block_bytes)

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        return drafts

    def take_drafts(self, table: Table, start: int, drafts: int) -> tuple[Table, Table]:
        assert len(table) == start // self._size + 1
        return table, tuple(self._allocate(drafts))

    def truncate(self, table: Table, spare: Table, start: int, positions: int) -> Table:
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
