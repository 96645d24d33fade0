"""The cache group of layers that attend to the last positions: a sequence gives back blocks it will not see again."""

from __future__ import annotations

from collections.abc import Collection

from mlx_tandem.kv.groups.table import Table, TableGroup
from mlx_tandem.kv.pool import SCRATCH, BlockPool, Window


class WindowGroup(TableGroup):
    """The group of layers that need keys and values of the positions in a window."""

    divides = True
    keeps_all = False
    snapshots = False

    def __init__(self, pool: BlockPool, window: Window, block_bytes: int = 0):
        super().__init__(pool, block_bytes)
        self.window = window

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence; practically unbounded where the pool holds a whole window."""
        usable = self.pool.usable_blocks
        return 1 << 62 if usable >= self.window.most(self._size) else usable * self._size

    def first_needed(self, position: int) -> int:
        """Return the first block that the window of `position` or of a later position reaches."""
        return self.window.first(position, self._size)

    def end_at_begin(self, known: int, tokens: int) -> int:
        """Return the end of the blocks that a sequence gets at once: those of its tokens, a window's at most."""
        end = self.pool.blocks_for(tokens)
        return min(end, self.first_needed(known) + self.window.most(self._size))

    def give_back(self, table: Table, computed: int, kept: Collection[int] = ()) -> tuple[Table, Table]:
        """Return the table with SCRATCH for the blocks before the window, and these blocks.

        The window is that of the start of the last block that is not full: a sequence that finds the last full block in
        the prefix cache needs the window before that position.
        """
        end = start = self.first_needed(computed // self._size * self._size)
        while start and table[start - 1] != SCRATCH:
            start -= 1
        if start == end:
            return table, ()
        return (*table[:start], *[SCRATCH] * (end - start), *table[end:]), table[start:end]
