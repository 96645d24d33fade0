"""Rows of a forward with one token each: those that decode, and beside them prompts and drafts, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import NOT_A_NUMBER, Row, RowKind, StepPlan
from mlx_tandem.model.step.inputs import Numbers

LEAST_DRAFTS = 4
"""Drafts of a row are padded to a power of two, this one at least, so that few kinds of steps are traced."""


class Drafts(NamedTuple):
    """Which of the rows that draw stand behind drafts.

    before: [rows, most] int32, the drafts of the same sequence up to a row's own token, -1 behind the last; first:
    [rows], where the row of the sequence is that has none; following: [rows], the draft behind the row's token, -1
    where there is none. A row that verifies nothing has no drafts.
    """

    before: mx.array
    first: mx.array
    following: mx.array

    def accept(self, tokens: mx.array, seats: mx.array, nobody: int) -> tuple[mx.array, mx.array]:
        """Return the seats [rows] for which what the rows drew counts, and those of which it is the newest token.

        tokens: [rows] int32, what each row drew; nobody: the seat that takes the place of the others.
        """
        place = mx.minimum(self.first[:, None] + mx.arange(self.before.shape[1])[None], len(tokens) - 1)
        counts = ((self.before < 0) | (self.before == tokens[place])).all(1)
        newest = counts & (self.following != tokens)
        return mx.where(counts, seats, nobody), mx.where(newest, seats, nobody)


def drafts_of(rows: Sequence[Row], count: int) -> list[Numbers]:
    """Return the arrays of `Drafts` for rows of a plan, each of which has one row of the forward for each of its tokens
    in this order, and for padding up to `count` rows.
    """
    longest = max(len(row.tokens) for row in rows if row.kind is RowKind.VERIFY) - 1
    most = 1 << (max(longest, LEAST_DRAFTS) - 1).bit_length()
    before = np.full((count, most), -1, np.int32)
    first, following = np.arange(count, dtype=np.int32), np.full(count, -1, np.int32)
    at = 0
    for row in rows:
        drafts = row.tokens[1:] if row.kind is RowKind.VERIFY else ()
        for n in range(1 + len(drafts)):
            before[at + n, :n] = drafts[:n]
            following[at + n] = drafts[n] if n < len(drafts) else -1
        first[at : at + 1 + len(drafts)] = at
        at += 1 + len(drafts)
    return [before, first, following]


def accepted(row: Row, drawn: Sequence[int]) -> tuple[int, ...]:
    """Return what a VERIFY row says by what its positions drew: its accepted drafts and one more, or NOT_A_NUMBER."""
    if NOT_A_NUMBER in drawn:
        return (NOT_A_NUMBER,)
    drafts = row.tokens[1:]
    right = next((n for n, draft in enumerate(drafts) if draft != drawn[n]), len(drafts))
    return tuple(drawn[: right + 1])


def take_verified(plan: StepPlan, rows: Sequence[int], drawn: Sequence[int], tokens: list[tuple[int, ...]]) -> None:
    """Set the tokens of the plan's `rows` by what each token of theirs drew."""
    own: dict[int, list[int]] = {}
    for i, token in zip(rows, drawn, strict=False):
        own.setdefault(i, []).append(token)
    for i, several in own.items():
        row = plan.rows[i]
        tokens[i] = accepted(row, several) if row.kind is RowKind.VERIFY else tuple(several)


def goes_with_decodes(row: Row) -> bool:
    """Return whether the tokens of a row are computed in the forward of the rows that decode: a chunk of one token has
    their shape, and where it is not scored, they can take it in.
    """
    return row.kind is not RowKind.PROMPT or row.piggybacked or (len(row.tokens) == 1 and not row.targets)


def token_by_token(indices: Sequence[int], rows: Sequence[Row]) -> tuple[list[int], list[Row]]:
    """Return a row for each token of those that go beside others, and of those that verify drafts, which all draw.
    `indices`: where each is in the plan.
    """
    every = [
        (i, Row(r.kind, r.sequence, r.seat, r.lora_slot, r.start + at, (token,), r.tables, r.sample and at >= first))
        for i, r in zip(indices, rows, strict=True)
        for first in (0 if r.kind is RowKind.VERIFY else len(r.tokens) - 1,)
        for at, token in enumerate(r.tokens)
    ]
    return [i for i, _ in every], [r for _, r in every]
