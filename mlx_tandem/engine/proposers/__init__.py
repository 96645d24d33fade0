"""Where drafts come from: guesses of a sequence's next tokens, which one step verifies together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_tandem.types import Request


class Proposer(Protocol):
    """A source of drafts for sequences that decode.

    A draft never changes what is said: the step that verifies it keeps it only where it is what would have been drawn.
    """

    def waits(self, request: Request, choice: int) -> bool:
        """Return whether the sequence is to have no row in this plan while its newest token is on the device.

        Drafts follow tokens that the host knows. Waiting costs the sequence a turn, so it is worth while only where
        drafts are likely and likely to be right.
        """

    def propose(self, request: Request, choice: int, tokens: Sequence[int], most: int) -> Sequence[int]:
        """Return guesses of the tokens that follow `tokens` (prompt and output), `most` of which are used at most."""
