"""The cache group of layers that attend to every position: a sequence keeps all of its blocks."""

from __future__ import annotations

from collections.abc import Collection

from mlx_tandem.kv.groups.table import Table, TableGroup


class AttentionGroup(TableGroup):
    """The group of layers that need keys and values of all positions."""

    divides = True
    keeps_all = True
    snapshots = False

    @property
    def longest(self) -> int:
        """Number of tokens for which the whole pool has blocks."""
        return self.pool.usable_blocks * self._size

    def first_needed(self, position: int) -> int:
        """Return 0: every block is needed."""
        return 0

    def end_at_begin(self, known: int, tokens: int) -> int:
        """Return the number of blocks for all tokens, which a sequence gets at once."""
        return self.pool.blocks_for(tokens)

    def give_back(self, table: Table, computed: int, kept: Collection[int] = ()) -> tuple[Table, Table]:
        """Return the table unchanged and no blocks."""
        return table, ()
