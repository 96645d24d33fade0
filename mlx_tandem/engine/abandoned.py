"""Sequences whose clients left while their prompts were being read. They stay until the blocks they read are published.

A block is published once a finite token has been drawn after it. The prompt of such a sequence is therefore truncated
after the part that has been computed, and the sequence draws one more token. The token is discarded.
"""

from __future__ import annotations

from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.sequence import Sequence


class AbandonedPrefills:
    """The sequences that stay for one more token."""

    def __init__(self, blocks: BlockManager):
        self._blocks = blocks
        self._kept: dict[int, Sequence] = {}  # by id

    def __bool__(self) -> bool:
        return bool(self._kept)

    def all(self) -> list[Sequence]:
        """Return all of them."""
        return list(self._kept.values())

    def keep(self, s: Sequence) -> bool:
        """Let `s` stay if it has computed whole blocks that are not published; return whether it stays."""
        if s.seat < 0 or s.has_drawn or s.siblings or s.reads_whole_prompt or s.next_adapter is not None:
            return False
        if not self._blocks.unpublished.has_any(s):
            return False
        if not s.pending:  # otherwise its first token is being drawn already
            s.cut(s.scheduled + 1)
        s.most_tokens = len(s.tokens) + 1
        self._kept[s.id] = s
        return True

    def reserve_or_list_lost(self) -> list[Sequence]:
        """Return those that cannot draw, because they have lost their seats or lack blocks.

        The others get blocks for their token here. No other sequence is preempted for them.
        """
        return [s for s in self.all() if s.seat < 0 or not (s.pending or self._has_room(s))]

    def settle(self, s: Sequence, *, is_finite: bool) -> bool:
        """Return whether `s`, which has drawn a token, is one of these. If so, publish its blocks.

        Nothing is published if the token was not finite, or if the blocks were lost meanwhile.
        """
        if s.id not in self._kept:
            return False
        if is_finite and s.seat >= 0:
            self._blocks.publish(s)
        return True

    def drop(self, s: Sequence) -> bool:
        """Note that a sequence has ended; return whether it was one of these."""
        return self._kept.pop(s.id, None) is not None

    def _has_room(self, s: Sequence) -> bool:
        """Return whether `s` has blocks for its token, which it takes if there are free ones."""
        return s.scheduled < s.room or self._blocks.reserve(s, s.scheduled + 1)
