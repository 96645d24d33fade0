"""Masks: which tokens a sequence may draw next, decided on the host while the device computes the logits.

The forward of a row may begin before the host knows the row's newest token. The mask is made once it knows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from mlx_tandem.engine.plan import Mask, Row, RowKind, StepPlan
from mlx_tandem.engine.sequence import Sequence as EngineSequence
from mlx_tandem.types import Request


class MaskMaker(Protocol):
    """A source of masks for the requests that need them."""

    def constrains(self, request: Request) -> bool:
        """Return whether every token of the request needs a mask."""

    def mask(self, request: Request, choice: int, tokens: Sequence[int]) -> Mask:
        """Return which tokens may follow `tokens` (prompt and output). The request fails when the mask is empty."""

    def forget(self, request: int, choice: int) -> None:
        """Drop what is kept of a choice that has ended."""


def masks_of_plan(
    maker: MaskMaker, plan: StepPlan, sequences: Mapping[int, EngineSequence], vocab_size: int
) -> list[list[Mask]]:
    """Return the masks of each masked row of a plan, whose sequences are looked up by their id.

    The draws of sequences that have ended since the launch are dropped, so every token is allowed for them.
    """
    everything = b"\xff" * (-(-vocab_size // 32) * 4)
    made: list[list[Mask]] = []
    for row in (plan.rows[i] for i in plan.masked):
        s = sequences.get(row.sequence)
        made.append([everything] * row.draws if s is None else masks_of_row(maker, s, row))
    return made


def masks_of_row(maker: MaskMaker, s: EngineSequence, row: Row) -> list[Mask]:
    """Return the masks of a row of `s`: one for what follows its newest token, and one for each of its drafts.

    After a draft that its own mask forbids or that ends the text, no draft is accepted, so the maker is not asked for
    the masks after it.
    """
    drafts = row.tokens[1:] if row.kind is RowKind.VERIFY else ()
    masks = [maker.mask(s.request, s.choice, s.tokens)]
    for n, draft in enumerate(drafts, 1):
        if draft in s.stop_ids or not allows(masks[-1], draft):
            return masks + masks[-1:] * (1 + len(drafts) - n)
        masks.append(maker.mask(s.request, s.choice, [*s.tokens, *drafts[:n]]))
    return masks


def allows(mask: Mask, token: int) -> bool:
    """Return whether a mask lets a token be drawn."""
    return bool(mask[token // 8] >> token % 8 & 1)
