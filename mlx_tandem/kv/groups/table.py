"""The methods of cache groups that are the same for every kind of group."""

from __future__ import annotations

from mlx_tandem.kv.pool import SCRATCH, BlockPool

Table = tuple[int, ...]
"""The blocks of one sequence in one group, in the order of its positions."""


class TableGroup:
    """The base of all groups; `CacheGroup` describes its methods."""

    most_drafts = 1 << 62

    def __init__(self, pool: BlockPool, block_bytes: int = 0):
        self.pool = pool
        self.block_bytes = block_bytes
        self._size = pool.block_size

    def room(self, table: Table) -> int:
        """Return how many positions a table has blocks for."""
        return len(table) * self._size

    def lacks(self, table: Table, positions: int) -> int:
        """Return how many blocks a table lacks for so many positions."""
        return max(-(-positions // self._size) - len(table), 0)

    def take(self, table: Table, positions: int) -> Table:
        """Return the table with blocks for so many positions."""
        return (*table, *self._allocate(self.lacks(table, positions)))

    def copy(self, table: Table, positions: int) -> tuple[Table, tuple[int, int] | None]:
        """Return the table of a sequence that shares the first `positions`, and (from, to) of a block to copy."""
        whole, rest = divmod(positions, self._size)
        shared, own = table[:whole], self._allocate(1 if rest else 0)
        self.pool.share(b for b in shared if b != SCRATCH)
        return (*shared, *own), (table[whole], own[0]) if own else None

    def draft_blocks(self, table: Table, start: int, drafts: int) -> int:
        """Return how many blocks the table lacks for the token at `start` and its drafts."""
        return max(-(-(start + 1 + drafts) // self._size) - len(table), 0)

    def take_drafts(self, table: Table, start: int, drafts: int) -> Table:
        """Return the table with blocks for the token at `start` and its drafts."""
        return (*table, *self._allocate(self.draft_blocks(table, start, drafts)))

    def truncate(self, table: Table, positions: int) -> Table:
        """Return the table with the blocks of `positions`, and release the others."""
        blocks = -(-positions // self._size)
        self.release(table[blocks:])
        return table[:blocks]

    def release(self, table: Table) -> None:
        """Release the blocks of a table, the last block first."""
        self.pool.release(b for b in reversed(table) if b != SCRATCH)

    def _allocate(self, blocks: int) -> list[int]:
        own = self.pool.allocate(blocks)
        assert own is not None, "the pool has fewer blocks than its group was asked for"
        return own
