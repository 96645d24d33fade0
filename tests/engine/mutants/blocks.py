"""Planted bugs in the use of blocks: forks, hits of the prefix cache, and when blocks are given back."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import Row, StepPlan, StepResult
from mlx_tandem.engine.prefix_leaders import PrefixLeaders
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.engine.unpublished import Unpublished
from mlx_tandem.kv import prefix
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.kv.prefix import Match, PrefixCache
from tests.engine.mutants.planting import Plant, attribute, preset


def _replace(s: Sequence, at: int, block: int) -> None:
    """Give a sequence another block of the first pool in this place."""
    s.tables = ((*s.table[:at], block, *s.table[at + 1 :]), *s.tables[1:])


def _fork(share: bool, copy: bool, whole: bool = False) -> Plant:
    """A fork that counts no reader, or copies nothing, or lets the choices write into one last block."""

    def fork(self: BlockManager, s: Sequence, f: Sequence) -> bool:
        copies = dict(self.writes.copies)
        if not original(self, s, f):
            return False
        shared = [b for b in f.table if b in s.table]
        if not share:
            self.groups[0].pool.release(shared)
        if whole and len(f.table) > len(shared):
            self.groups[0].pool.release(f.table[-1:])
            _replace(f, len(f.table) - 1, s.table[len(f.table) - 1])
            self.groups[0].pool.share(f.table[-1:])
        if not copy:
            self.writes.copies = copies
        return True

    original = BlockManager.fork

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(BlockManager, "fork", fork)

    return plant


def _copy_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A fork copies a block that the same plan is only about to fill."""

    def fork(self: BlockManager, s: Sequence, f: Sequence) -> bool:
        forked = original(self, s, f)
        for target in self.writes.copies:
            if target in f.table:
                self.writes.copies[target] = s.table[len(f.table) - 1]
        return forked

    original = BlockManager.fork
    patch.setattr(BlockManager, "fork", fork)


def _hit_everything(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is there as a whole leaves nothing to compute."""

    def match(self: BlockManager, s: Sequence) -> Match:
        if not self._caches or s.scores is not None:
            return Match([[]], [0])
        return prefix.find(self._caches, self._keys.chain(s), s.tokens)

    patch.setattr(BlockManager, "match", match)


def _hit_scored(patch: pytest.MonkeyPatch) -> None:
    """A prompt whose logprobs are asked for is not computed where it is there."""
    patch.setattr(BlockManager, "match", lambda self, s: prefix.find(self._caches, self._keys.chain(s), s.tokens[:-1]))


def _publish_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks can be found as soon as the step that fills them is planned."""

    def row(self: Scheduler, s: Sequence, *args: Any) -> Row:
        made = original(self, s, *args)
        known = s.tokens[: s.scheduled]
        if s.is_pure and self._blocks._caches:
            self._blocks._caches[0].publish(self._blocks._keys.chain(s), known, s.table)
        return made

    original = Scheduler._row
    patch.setattr(Scheduler, "_row", row)


def _write_into_hits(patch: pytest.MonkeyPatch) -> None:
    """A block that agrees in part is shared as it is, and written to."""

    def begin(self: BlockManager, s: Sequence) -> None:
        match, copies = self.match(s), dict(self.writes.copies)
        original(self, s)
        if match.extra and self.writes.copies != copies:
            self.writes.copies = copies
            own, at = s.table[match.whole], match.whole
            self.groups[0].pool.share((match.sources[0],))
            self.groups[0].pool.release((own,))
            _replace(s, at, match.sources[0])

    original = BlockManager.begin
    patch.setattr(BlockManager, "begin", begin)


def _trust_after_failure(patch: pytest.MonkeyPatch) -> None:
    """Blocks that were cached before a failed step can still be found."""
    patch.setattr(BlockManager, "distrust", lambda self: self.writes.distrust())


def _evict_in_silence(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given to others and can still be found."""
    patch.setattr(PrefixCache, "_on_evict", lambda self, block: None)
    patch.setattr(PrefixCache, "check", lambda self: None)


def _wait_for_the_gone(patch: pytest.MonkeyPatch) -> None:
    """Sequences still wait for a leader that has left."""
    patch.setattr(PrefixLeaders, "retract", lambda self, s: None)
    patch.setattr(BlockManager, "check", lambda self, sequences: None)


def _early_release(patch: pytest.MonkeyPatch) -> None:
    """A sequence whose last token is being drawn gives its last block back before that."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        for s in self.queue.running:
            if made and s.is_complete and s.table:
                self._blocks.groups[0].pool.release(s.table[-1:])
                s.tables = (s.table[:-1], *s.tables[1:])
        return made

    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", plan)


def _release_twice_shared(patch: pytest.MonkeyPatch) -> None:
    """Blocks with two readers are free when the first leaves."""

    def release(self: BlockPool, blocks: Any) -> None:
        blocks = list(blocks)
        original(self, blocks)
        for b in blocks:
            if self.count[b] == 1 and self.free_blocks < 3:
                self._free[b] = True
                self._stack.append(b)
                self.free_blocks += 1

    original = BlockPool.release
    patch.setattr(BlockPool, "release", release)


def _leave_unclean(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a row that was not finite go to their next owner as they are."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        outcome = original(self, plan, result)
        self._blocks.writes.distrust()
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _set_aside_unread(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence keeps a block more than it has read."""

    def set_aside(self: Unpublished, s: Sequence) -> None:
        s.scheduled += self._size
        original(self, s)
        s.scheduled -= self._size

    original = Unpublished.set_aside
    patch.setattr(Unpublished, "set_aside", set_aside)


PLANTS: dict[str, Plant] = {
    "a fork counts no readers": _fork(share=False, copy=True),
    "a fork copies nothing": _fork(share=True, copy=False),
    "a fork shares the block that is written": _fork(share=True, copy=False, whole=True),
    "a fork copies what is not there yet": _copy_a_copy,
    "a whole prompt is a hit": _hit_everything,
    "a scored prompt is a hit": _hit_scored,
    "blocks are published before their step is read": _publish_early,
    "a hit is written to": _write_into_hits,
    "a hit is longer than it agrees": attribute(prefix, "_shared", lambda a, b: min(len(a), len(b))),
    "what is not of one version can be found": preset(BlockManager, "publish", "is_pure", True),
    "what a failed step leaves can be found": _trust_after_failure,
    "what is given to others can be found": _evict_in_silence,
    "whoever has left is waited for": _wait_for_the_gone,
    "blocks are released early": _early_release,
    "shared blocks are released early": _release_twice_shared,
    "what is not finite is left in the blocks": _leave_unclean,
    "what was not read is kept for later": _set_aside_unread,
}
