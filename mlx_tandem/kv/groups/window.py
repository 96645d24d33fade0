"""Layers that attend to a window of the last positions: a sequence gives back the blocks that it will not see again."""

from __future__ import annotations

from mlx_tandem.kv.groups.table import Table, TableGroup
from mlx_tandem.kv.pool import SCRATCH, BlockPool, Window


class WindowGroup(TableGroup):
    """Keys and values of the positions in a window."""

    divides = True
    keeps_all = False

    def __init__(self, pool: BlockPool, window: Window, block_bytes: int = 0):
        super().__init__(pool, block_bytes)
        self.window = window

    @property
    def longest(self) -> int:
        usable = self.pool.usable_blocks
        return 1 << 62 if usable >= self.window.most(self._size) else usable * self._size

    def first_needed(self, position: int) -> int:
        return self.window.first(position, self._size)

    def end_of_seating(self, known: int, tokens: int) -> int:
        end = self.pool.blocks_for(tokens)
        return min(end, self.first_needed(known) + self.window.most(self._size))

    def give_back(self, table: Table, computed: int) -> tuple[Table, Table]:
        # As of its last whole block: whoever finds that needs what comes before it.
        end = start = self.first_needed(computed // self._size * self._size)
        while start and table[start - 1] != SCRATCH:
            start -= 1
        if start == end:
            return table, ()
        return (*table[:start], *[SCRATCH] * (end - start), *table[end:]), table[start:end]
