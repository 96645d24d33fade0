"""The blocks of drafts: taken for the row that verifies them, and given back where they are rejected."""

from __future__ import annotations

from collections.abc import Iterable

from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups import CacheGroup, room_of


class DraftBlocks:
    """The blocks that sequences hold for drafts, in all groups of a model."""

    def __init__(self, groups: Iterable[CacheGroup]):
        self._groups = tuple(groups)

    def take(self, s: Sequence, drafts: int, running: int) -> int:
        """Take blocks for up to `drafts` tokens after the newest of `s`; return for how many there were blocks.

        Drafts leave one block to each of the `running` sequences, so that nobody is preempted for a draft.
        """
        drafts = min([drafts, *(group.most_drafts for group in self._groups)])
        while drafts and not self._has_room_for(s, drafts, running):
            drafts -= 1
        if drafts:
            each = zip(self._groups, s.tables, strict=True)
            s.tables = tuple([group.take_drafts(table, s.scheduled, drafts) for group, table in each])
            s.room = room_of(self._groups, s.tables)
        return drafts

    def truncate(self, s: Sequence, positions: int) -> None:
        """Keep the first `positions` of `s`, and give back the blocks behind them that `take` took."""
        each = zip(self._groups, s.tables, strict=True)
        s.tables = tuple([group.truncate(table, positions) for group, table in each])
        s.room = room_of(self._groups, s.tables)

    def _has_room_for(self, s: Sequence, drafts: int, running: int) -> bool:
        """Return whether every group has blocks for the drafts and one for each running sequence."""
        for group, table in zip(self._groups, s.tables, strict=True):
            blocks = group.draft_blocks(table, s.scheduled, drafts)
            if blocks and blocks + running > group.pool.free_blocks:
                return False
        return True
