"""The drafts that rows verify: when a sequence drafts, and how many drafts there is room for."""

from __future__ import annotations

import logging
from collections.abc import Collection
from itertools import takewhile

from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.plan import Row, StepPlan, StepResult
from mlx_tandem.engine.proposers import Asked, Proposer
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.types import DraftSource, Request, SpeculationStats

log = logging.getLogger(__name__)


class Drafting:
    """The scheduler's side of a proposer. Without a proposer no sequence drafts."""

    def __init__(self, blocks: BlockManager, vocab_size: int, most_tokens: int):
        """Create it without a proposer. A step draws `most_tokens` at most."""
        self._blocks = blocks
        self._vocab_size = vocab_size
        self.most_tokens = most_tokens
        self._running = 0
        self.proposes: Proposer | None = None  # where sequences draft in the plan that is being made
        self.proposer: Proposer | None = None  # the owner sets it before the first request

    def begin(self, running: Collection[Sequence], wanted: Collection[Sequence]) -> None:
        """Begin a plan in which these sequences run, the `wanted` of which may have rows."""
        self._running, self.proposes = len(running), None
        if self.proposer is not None:
            for_all = self.proposer.for_all
            may_draft = any(s.request.speculate if for_all else s.request.prediction for s in running)
            if self.proposer.is_on(len(running) if may_draft else 0):
                self.proposes = self.proposer
                if self.proposer.together:
                    self.proposer.prepare(self._asked(wanted, self.proposer))

    @property
    def drafts_in_steps(self) -> bool:
        """Whether the steps of the plan that is being made should draft for later ones."""
        return self.proposes is not None and self.proposes.in_steps

    def offer(self, s: Sequence, draft: int) -> None:
        """Show the proposer a draft that a step made for what follows all tokens of `s`."""
        if self.proposer is not None:
            self.proposer.offer(s.request, s.choice, len(s.tokens), draft)

    def _asked(self, wanted: Collection[Sequence], by: Proposer) -> list[Asked]:
        """Return the sequences that may draft in this plan, each with a fair part of what a step may draw."""
        able = [s for s in wanted if s.wants_decode and not s.siblings and self._may_draft(s.request, by)]
        fair = self.most_tokens // max(self._running, 1)
        return [
            Asked(s.request, s.choice, s.tokens, s.pending, max(min(s.most_tokens - s.total, fair) - 1, 0))
            for s in able
        ]

    def waits(self, s: Sequence) -> bool:
        """Return whether `s`, whose newest token is on the device, has no row until the host knows that token."""
        by = self.proposes
        return by is not None and self._may_draft(s.request, by) and by.needs_newest(s.request, s.choice)

    def drafts(self, s: Sequence, rows: list[Row]) -> tuple[int, ...]:
        """Return drafts to follow the tokens of `s`, and take blocks for them.

        They are as many as `s` may still have, as there are blocks for, and as are a fair part of the tokens that a
        step may draw, of which `rows` have theirs.
        """
        by = self.proposes
        if by is None or not self._may_draft(s.request, by):
            return ()
        room = self.most_tokens - sum(len(row.tokens) for row in rows)
        most = min(s.most_tokens - s.total, room // max(self._running - len(rows), 1)) - 1
        if most < 1:
            return ()
        try:
            proposed = by.propose(s.request, s.choice, s.tokens, s.pending, most)[:most]
        except Exception as e:  # answers do not depend on drafts
            log.warning("drafts are off from here on, since their proposer failed: %r", e)
            self.proposer = self.proposes = None
            return ()
        drafts = tuple(takewhile(lambda token: 0 <= token < self._vocab_size, proposed))
        return drafts[: self._blocks.drafts.take(s, len(drafts), self._running)] if drafts else ()

    def source(self, s: Sequence) -> DraftSource | None:
        """Return the source of the drafts that `drafts` last returned for `s`."""
        return None if self.proposes is None else self.proposes.source(s.request, s.choice)

    def settle(self, s: Sequence, row: Row, drawn: int) -> None:
        """Take in how many tokens a VERIFY row of `s` brought, and give back what its rejected drafts had."""
        s.pending -= len(row.tokens) - 1
        s.slack -= len(row.tokens) - 1
        if self.proposer is not None:
            self.proposer.settle(s.request, s.choice, len(row.tokens) - 1, drawn - 1, row.source)
        if s.seat >= 0:  # else it has already given its blocks back
            s.scheduled -= len(row.tokens) - drawn
            self._blocks.drafts.truncate(s, s.scheduled)

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Show the proposer a step that was just read."""
        if self.proposer is not None:
            self.proposer.observe(plan, result)

    def stats(self) -> SpeculationStats | None:
        """Return the proposer's counters; None without a proposer."""
        return None if self.proposer is None else self.proposer.stats()

    @staticmethod
    def _may_draft(request: Request, by: Proposer) -> bool:
        """Return whether `by` may draft for the sequences of a request."""
        return request.speculate and (by.for_all or bool(request.prediction))

    def forget(self, s: Sequence) -> None:
        """Tell the proposer that `s` has ended."""
        if self.proposer is not None:
            self.proposer.forget(s.request, s.choice)


def predicted_of(row: Row, drawn: tuple[int, ...], said: tuple[int, ...]) -> tuple[int, int]:
    """Return how many drafts of a VERIFY row its sequence says, and how many it does not.

    `drawn` are the accepted drafts and one more token, and `said` their part up to the end of the sequence.
    """
    accepted = min(len(said), len(drawn) - 1)
    return accepted, len(row.tokens) - 1 - accepted
