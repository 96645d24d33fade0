"""Layers that attend to every position: a sequence keeps all of its blocks."""

from __future__ import annotations

from mlx_tandem.kv.groups.table import Table, TableGroup


class AttentionGroup(TableGroup):
    """Keys and values of all positions."""

    divides = True
    keeps_all = True

    @property
    def longest(self) -> int:
        return self.pool.usable_blocks * self._size

    def first_needed(self, position: int) -> int:
        return 0

    def end_of_seating(self, known: int, tokens: int) -> int:
        return self.pool.blocks_for(tokens)

    def give_back(self, table: Table, computed: int) -> tuple[Table, Table]:
        return table, ()
