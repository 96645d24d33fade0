"""The rows of each forward of a step: rows of one token, drafts among them, and the division into rectangles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.plan import NOT_A_NUMBER, Row, RowKind, StepPlan
from mlx_tandem.model import backend
from mlx_tandem.model.inputs import Numbers
from mlx_tandem.model.shapes import blocks_read, cut, split_by_context

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


COMMON_OFFSET_TOKENS = 256
"""Fewest tokens of a chunk after a context that are worth a forward of their own where masks make attention slow."""


class Rectangles:
    """Divides the rows of a plan into forwards, within the limits of one forward.

    Attributes:
        fused_length: Up to so many tokens per row, kernels read the pool in place: the forward needs no memory for
            gathered keys, and short contexts are not padded to the length of long ones. 0: no kernels do.
        limits: The most positions and pairs of query and key of one forward.
        gathered_share: As in `Forward`; 1 until the owner sets it.
        groups: Whether at least one layer has a kernel for adjacent rows of one sequence; False until it is set.
        common_offsets: Whether rows that begin at one position are read without a mask.
    """

    def __init__(
        self,
        block_size: int,
        window: int | None,
        fused_length: int,
        limits: StepLimits,
        row_counts: Sequence[int],
        *,
        unpadded: bool = False,
    ):
        """Create it. `unpadded`: the tokens of rows are not padded, and rows that begin are apart from others."""
        self.fused_length = fused_length
        self.limits = limits
        self.common_offsets = backend.current().arithmetic.masks_are_slow
        self._block_size = block_size
        self._window = window  # of the first pool
        self._row_counts = row_counts
        self.unpadded = unpadded
        self.gathered_share = 1.0
        self.groups = False

    def of(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each forward.

        Rows are grouped by padded length, apart if they need the logits of all positions, and split where their
        contexts differ much. Groups that would need more memory than the limits allow are cut.
        """
        decodes = [i for i, r in enumerate(rows) if self._goes_with_decodes(r)]
        usual = (1, False, False, None, False, False)
        by_length: dict[tuple[int, bool, bool, int | None, bool, bool], list[int]] = {usual: decodes} if decodes else {}
        for i, r in enumerate(rows) if len(decodes) < len(rows) else ():
            if self._goes_with_decodes(r):
                continue
            common_offset = self.common_offset([r])
            apart = None if common_offset is None else i if common_offset else -1
            begins = self.unpadded and r.start == 0
            length = self.length(len(r.tokens))
            shows = length == 1 and bool(r.images)
            by_length.setdefault((length, bool(r.targets), r.pooling is not None, apart, begins, shows), []).append(i)
        pieces = []
        for (length, *_), group in by_length.items():
            if length <= self.fused_length:
                pieces += self._within_states(group, rows, length)
                continue
            blocks = {i: blocks_read(rows[i], self._block_size, self._window) for i in group}
            if length == 1:  # each token of such a row reads its blocks by itself
                blocks = {i: n * len(rows[i].tokens) for i, n in blocks.items()}
            positions = min(self.limits.positions, self.limits.pairs // length)
            for part in split_by_context(group, blocks):
                for piece in cut(part, blocks, positions // self._block_size, self.good_counts(length)):
                    pieces += self._within_states(piece, rows, length)
        return pieces

    def of_drafting(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each forward of a plan whose rows draw several tokens each."""
        blocks = {i: blocks_read(r, self._block_size, self._window) for i, r in enumerate(rows)}
        return split_by_context(range(len(rows)), blocks)

    def _within_states(self, group: list[int], rows: Sequence[Row], length: int) -> list[list[int]]:
        """Return the rows in pieces whose states one forward may hold: one for each row, or for each draft.

        If all rows have one token, go on from a state and verify nothing, only the share that is gathered counts.
        """
        apart = any(len(rows[i].tokens) > 1 or rows[i].slack or rows[i].start == 0 for i in group)
        share = 1.0 if apart else self.gathered_share
        pieces: list[list[int]] = [[]]
        held = 0.0
        for i in group:
            own = share * (len(rows[i].tokens) if length == 1 else 1)
            if pieces[-1] and held + own > self.limits.rows:
                pieces.append([])
                held = 0.0
            pieces[-1].append(i)
            held += own
        return pieces

    def length(self, tokens: int) -> int:
        """Return the length of a forward whose longest row has so many tokens."""
        return tokens if self.unpadded or tokens == 1 else padded_length(tokens)

    def _goes_with_decodes(self, row: Row) -> bool:
        """Return whether the tokens of a row are computed in the forward of the decoding rows."""
        return goes_with_decodes(row) and not (self.unpadded and row.start == 0)

    @property
    def gathers(self) -> bool:
        """Whether keys and values are copied for each row, since no kernel reads the pool."""
        return not self.fused_length

    def good_counts(self, length: int) -> Sequence[int]:
        """Return the good row counts for rows of one token; padding longer rows would cost much."""
        return self._row_counts if length == 1 else ()

    def common_offset(self, rows: Sequence[Row]) -> int | None:
        """Return the `common_offset` of `StepView` for rows of one forward."""
        start, length = rows[0].start, len(rows[0].tokens)
        worth = length > max(1, self.fused_length) if start == 0 else len(rows) == 1 and length >= COMMON_OFFSET_TOKENS
        return start if self.common_offsets and worth and all(r.start == start for r in rows) else None
