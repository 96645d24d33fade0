"""Masks: which tokens a sequence may draw next, decided on the host while the device computes the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mlx_tandem.engine.plan import Mask, Row, RowKind
from mlx_tandem.engine.sequence import Sequence as EngineSequence
from mlx_tandem.types import Request


class MaskMaker(Protocol):
    """A source of masks for the requests that need them."""

    def constrains(self, request: Request) -> bool:
        """Return whether every token of the request needs a mask."""

    def mask(self, request: Request, choice: int, tokens: Sequence[int]) -> Mask:
        """Return which tokens may follow `tokens` (prompt and output). The request fails when the mask is empty."""


def masks_of_row(maker: MaskMaker, s: EngineSequence, row: Row) -> list[Mask]:
    """Return the masks of a row of `s`: one for what follows its newest token, and one for each of its drafts.

    After a draft that its own mask forbids, no draft is accepted, so the maker is not asked for the masks after it.
    """
    drafts = row.tokens[1:] if row.kind is RowKind.VERIFY else ()
    masks = [maker.mask(s.request, s.choice, s.tokens)]
    for n, draft in enumerate(drafts, 1):
        if not allows(masks[-1], draft):
            return masks + masks[-1:] * (1 + len(drafts) - n)
        masks.append(maker.mask(s.request, s.choice, [*s.tokens, *drafts[:n]]))
    return masks


def allows(mask: Mask, token: int) -> bool:
    """Return whether a mask lets a token be drawn."""
    return bool(mask[token // 8] >> token % 8 & 1)
