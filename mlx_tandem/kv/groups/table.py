"""What all groups do alike with the blocks of a table."""

from __future__ import annotations

from mlx_tandem.kv.pool import SCRATCH, BlockPool

Table = tuple[int, ...]
"""The blocks of one sequence in one group, in the order of its positions."""


class TableGroup:
    """The verbs of `CacheGroup` that are the same for every kind of group."""

    def __init__(self, pool: BlockPool, block_bytes: int = 0):
        self.pool = pool
        self.block_bytes = block_bytes
        self._size = pool.block_size

    def room(self, table: Table) -> int:
        return len(table) * self._size

    def lacks(self, table: Table, positions: int) -> int:
        return max(-(-positions // self._size) - len(table), 0)

    def take(self, table: Table, positions: int) -> Table:
        return (*table, *self._allocate(self.lacks(table, positions)))

    def copy(self, table: Table, positions: int) -> tuple[Table, tuple[int, int] | None]:
        whole, rest = divmod(positions, self._size)
        shared, own = table[:whole], self._allocate(1 if rest else 0)
        self.pool.share(b for b in shared if b != SCRATCH)
        return (*shared, *own), (table[whole], own[0]) if own else None

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        return self.lacks(table, start + 1 + drafts)

    def take_drafts(self, table: Table, start: int, drafts: int) -> tuple[Table, Table]:
        return self.take(table, start + 1 + drafts), ()

    def truncate(self, table: Table, spare: Table, start: int, positions: int) -> Table:
        blocks = -(-positions // self._size)
        self.release(table[blocks:])
        return table[:blocks]

    def release(self, table: Table) -> None:
        self.pool.release(b for b in reversed(table) if b != SCRATCH)

    def _allocate(self, blocks: int) -> list[int]:
        own = self.pool.allocate(blocks)
        assert own is not None, "the pool has fewer blocks than its group was asked for"
        return own
