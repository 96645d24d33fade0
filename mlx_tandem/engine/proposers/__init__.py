"""Proposers of drafts: guesses of a sequence's next tokens, which one step verifies together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_tandem.types import Request


class Proposer(Protocol):
    """A source of drafts for sequences that decode.

    Drafts never change the output: the step that verifies a draft keeps it only if the same token would have been
    drawn.
    """

    def waits(self, request: Request, choice: int) -> bool:
        """Return whether a sequence whose newest token is still on the device should have no row in this plan.

        Drafts follow tokens that the host knows. Waiting costs the sequence a turn, so it is worthwhile only where
        drafts are likely to be found and to be accepted.
        """

    def propose(self, request: Request, choice: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return guesses of the tokens that follow `tokens` (prompt and output), `most` of which are used at most."""
