"""Rows of one token: decoding rows, and prompts and drafts that share their forward token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import NOT_A_NUMBER, Row, RowKind, StepPlan
from mlx_tandem.model.inputs import Numbers

PADDED_DRAFTS = tuple(4**n for n in range(1, 12))
"""Numbers to which the drafts of a row are padded; few, so that few kinds of steps are traced."""


class Drafts(NamedTuple):
    """The drafts before and after the tokens of the rows that draw, as arrays of int32.

    before: [rows, most], the drafts of the same sequence up to the row's own token, then -1; first: [rows], the index
    of the sequence's first row, which has no drafts before it; following: [rows], the draft after the row's token, -1
    where there is none.
    """

    before: mx.array
    first: mx.array
    following: mx.array

    def accept(self, tokens: mx.array, seats: mx.array, nobody: int) -> tuple[mx.array, mx.array]:
        """Return the seats [rows] of rows whose drawn token counts, and of rows whose drawn token is the newest.

        tokens: [rows] int32, the token that each row drew; nobody: the seat in place of other rows' seats.
        """
        place = mx.minimum(self.first[:, None] + mx.arange(self.before.shape[1])[None], len(tokens) - 1)
        counts = ((self.before < 0) | (self.before == tokens[place])).all(1)
        newest = counts & (self.following != tokens)
        return mx.where(counts, seats, nobody), mx.where(newest, seats, nobody)


def drafts_of(rows: Sequence[Row], count: int) -> list[Numbers]:
    """Return the arrays of `Drafts` for rows of a plan that draw, padded to `count` rows.

    Each token of a VERIFY row has a row of the forward; any other row has one, which draws.
    """
    drafts = [row.tokens[1:] if row.kind is RowKind.VERIFY else () for row in rows]
    tokens = np.array([1 + len(own) for own in drafts])
    most = next(n for n in PADDED_DRAFTS if n >= tokens.max() - 1)
    padded = np.array([own + (-1,) * (most + 1 - len(own)) for own in drafts], np.int32)
    sequence = np.arange(len(drafts)).repeat(tokens)  # of each token
    begin = (tokens.cumsum() - tokens)[sequence]
    number = np.arange(len(sequence)) - begin  # of the token in its row
    before = np.full((count, most), -1, np.int32)
    before[: len(sequence)] = np.where(np.arange(most) < number[:, None], padded[sequence, :most], -1)
    first, following = np.arange(count, dtype=np.int32), np.full(count, -1, np.int32)
    first[: len(sequence)], following[: len(sequence)] = begin, padded[sequence, number]
    return [before, first, following]


def settled(offset: mx.array, bound: mx.array, newest: mx.array) -> mx.array:
    """Return where the tokens of rows with slack are, and `offset` [rows] for other rows.

    bound: [rows], where the row of each token begins if all drafts before it are accepted, and -1 for other rows;
    newest: [rows], where its seat's newest token is.
    """
    return offset + mx.where(bound < 0, 0, newest - bound)


def places_at(
    offset: mx.array, given: Sequence[mx.array], windows: Sequence[int | None], block_size: int
) -> list[mx.array]:
    """Return the slot mapping [rows, 1] and the tables [rows, blocks] in each pool of tokens at `offset` [rows].

    given: for each pool the first block [rows] in each table, and the tables. With a window the tables that are
    returned begin with the first block that the token sees.
    """
    places: list[mx.array] = []
    for first, tables, window in zip(given[::2], given[1::2], windows, strict=True):
        if window is not None:
            begin = mx.maximum(offset + (1 - window), 0) // block_size
            column = (begin - first)[:, None] + mx.arange(tables.shape[1])[None]
            tables, first = mx.take_along_axis(tables, mx.minimum(column, tables.shape[1] - 1), 1), begin
        block = mx.take_along_axis(tables, (offset // block_size - first)[:, None], 1)
        places += [block * block_size + (offset % block_size)[:, None], tables]
    return places


def accepted(row: Row, drawn: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens of a VERIFY row whose positions drew `drawn`: accepted drafts and one more, or NOT_A_NUMBER."""
    if NOT_A_NUMBER in drawn:
        return (NOT_A_NUMBER,)
    drafts = row.tokens[1:]
    right = next((n for n, draft in enumerate(drafts) if draft != drawn[n]), len(drafts))
    return tuple(drawn[: right + 1])


def take_verified(plan: StepPlan, rows: Sequence[int], drawn: Sequence[int], tokens: list[tuple[int, ...]]) -> None:
    """Set `tokens` of the plan's `rows` from the drawn tokens; a VERIFY row has an entry for each of its positions."""
    own: dict[int, list[int]] = {}
    for i, token in zip(rows, drawn, strict=False):
        own.setdefault(i, []).append(token)
    for i, several in own.items():
        row = plan.rows[i]
        tokens[i] = accepted(row, several) if row.kind is RowKind.VERIFY else tuple(several)


def goes_with_decodes(row: Row) -> bool:
    """Return whether the tokens of a row are computed in the forward of the decoding rows.

    A chunk of one token has the shape of those rows, so it belongs there unless it is scored. Pooled
    rows and rows with images never do.
    """
    if row.pooling is not None or row.images:
        return False
    return row.kind is not RowKind.PROMPT or row.piggybacked or (len(row.tokens) == 1 and not row.targets)


def token_by_token(
    indices: Sequence[int], rows: Sequence[Row], each: int = 1, nobody: int = 0
) -> tuple[list[int], list[Row]]:
    """Return a row for each token of these rows, with the index in the plan of the row that it comes from.

    All tokens of a VERIFY row draw; in other rows the last one draws if the row samples. indices: the rows' own indices
    in the plan; each: the number of rows to which the rows of one index are padded; nobody: the seat of padding.
    """
    every = [
        (
            i,
            Row(
                r.kind,
                r.sequence,
                r.seat,
                r.lora_slot,
                r.start + at,
                (token,),
                r.tables,
                r.sample and at >= first,
                slack=r.slack,
                following=r.tokens[at + 1] if at + 1 < len(r.tokens) else r.following,
                shift=r.shift,
            ),
        )
        for i, r in zip(indices, rows, strict=True)
        for first in (0 if r.kind is RowKind.VERIFY else len(r.tokens) - 1,)
        for at, token in enumerate(r.tokens)
    ]
    if each > 1:
        every = list(_padded_groups(every, each, nobody))
    return [i for i, _ in every], [r for _, r in every]


def _padded_groups(every: Sequence[tuple[int, Row]], each: int, nobody: int) -> Iterator[tuple[int, Row]]:
    """Yield these rows with their indices in the plan, with the rows of each index padded to `each` rows."""
    for i, own in groupby(every, key=itemgetter(0)):
        several = list(own)
        yield from several
        row = several[0][1]
        nothing = Row(RowKind.DECODE, row.sequence, nobody, row.lora_slot, 0, (0,), ((),) * len(row.tables), False)
        yield from ((i, nothing) for _ in range(each - len(several)))
