"""Proposers of drafts: guesses of a sequence's next tokens, which one step verifies together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.types import DraftSource, Request, SpeculationStats


class Asked(NamedTuple):
    """A sequence that may draft in the plan that is being made: what `propose` will be called with."""

    request: Request
    choice: int
    tokens: Sequence[int]
    unread: int
    most: int


class Proposer(Protocol):
    """A source of drafts for sequences that decode.

    Drafts never change the output: the step that verifies a draft keeps it only if the same token would have been
    drawn.
    """

    for_all: bool
    """Whether it drafts for all requests, and not only for those that bring a prediction."""

    together: bool
    """Whether the drafts of all sequences of a plan are made together, by `prepare`."""

    in_steps: bool
    """Whether the model's own steps make drafts, which `offer` brings."""

    def is_on(self, rows: int) -> bool:
        """Return whether sequences draft in the plan that is being made, in which so many run; 0: none may draft."""

    def needs_newest(self, request: Request, choice: int) -> bool:
        """Return whether a sequence whose newest token is still on the device should have no row in this plan.

        Waiting costs the sequence a turn. It is worthwhile where drafts are likely to be found once the token is
        known, and not before.
        """

    def prepare(self, asked: Sequence[Asked]) -> None:
        """Make the drafts of a plan for all sequences that may draft in it. It is called before `propose`, if at all.

        Some of them may not be asked for their drafts, and `most` may be less then.
        """

    def offer(self, request: Request, choice: int, tokens: int, draft: int) -> None:
        """Take in what a step expects after the first `tokens` tokens of a sequence, which are all that it has."""

    def propose(self, request: Request, choice: int, tokens: Sequence[int], unread: int, most: int) -> Sequence[int]:
        """Return guesses of a sequence's next tokens, `most` of which are used at most.

        They follow `tokens` (prompt and output) and `unread` tokens after these that are on the device still: the
        drafts that were proposed last, as if they were accepted, and one more.
        """

    def source(self, request: Request, choice: int) -> DraftSource | None:
        """Return the source of the drafts that were last proposed for a sequence."""

    def settle(self, request: Request, choice: int, drafts: int, accepted: int, source: DraftSource | None) -> None:
        """Note how many drafts of a row were accepted. `source` is what the method `source` returned for them."""

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Take in a step that was just read."""

    def stats(self) -> SpeculationStats | None:
        """Return the counters since the start, if there are any."""

    def forget(self, request: Request, choice: int) -> None:
        """Drop what is known about a sequence that has ended."""
