"""Everything that a forward of rows is given: its key, the numbers about its rows, and their sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import CARRY, Row, RowKind, StepPlan
from mlx_tandem.model.cache.turns import TurnNumbers
from mlx_tandem.model.inputs import Numbers, padded
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.ops.lora.state import LoraState, Route
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags
from mlx_tandem.model.shapes import (
    blocks_read,
    coarse_count,
    coarse_width,
    drafting_length,
    drafting_width,
    group_size,
    most_blocks_read,
    row_count,
    table_width,
)
from mlx_tandem.model.step.index_arrays import IndexArrays
from mlx_tandem.model.step.operands import Operands, StepKey
from mlx_tandem.model.step.rows import Rectangles, drafts_of, token_by_token
from mlx_tandem.model.step.seats import Seats

VIEW_BLOCKS = 32
"""Fewest blocks that a prompt chunk reads in place, if they are contiguous, instead of gathering them."""


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of one forward.

    Attributes:
        indices: The plan's row of each row that draws, or of each row if none draws.
        rows: Those rows.
        every: All rows of the forward.
        in_place: For each pool the range of blocks that the forward reads where they lie, else None.
        mixed: Whether prompts or drafts share the forward of decoding rows, token by token.
        verifies: Whether rows have drafts, or follow rows with drafts that the host has not read.
        turns: The numbers of the turns in which recurrent layers verify drafts.
    """

    key: StepKey
    operands: Operands[Numbers]
    sampling: list[mx.array]
    route: Route
    indices: list[int]
    rows: list[Row]
    every: list[Row]
    in_place: tuple[tuple[int, int] | None, ...]
    mixed: bool
    verifies: bool
    turns: TurnNumbers | None


class Extent(NamedTuple):
    """The padded sizes of a forward: rows, tokens of each row, and the width of each pool's tables."""

    rows: int
    length: int
    widths: Sequence[int]


class Draws(NamedTuple):
    """The rows of a forward that draw.

    `seats` has a seat for each row of the forward. In a mixed step, in which most rows do not draw, `picked` has the
    indices of those that do, and `drawn_seats` their seats, padded; elsewhere `picked` is empty.
    """

    seats: list[int]
    picked: list[int]
    drawn_seats: list[int]
    flags: SamplingFlags
    arrays: list[mx.array]

    @property
    def padded_picks(self) -> list[int]:
        """The picked indices, padded with 0 to the number of their seats."""
        return self.picked + [0] * (len(self.drawn_seats) - len(self.picked))


class InputBuilder:
    """Makes the inputs of the forwards of plans.

    windows: each pool's longest window; None: it has none. mtp: whether the model has a head for multi-token prediction
    that is used; images: whether it has an encoder of images.
    """

    def __init__(
        self,
        seats: Seats,
        lora: LoraState,
        index_arrays: IndexArrays,
        rectangles: Rectangles,
        windows: Sequence[int | None],
        block_size: int,
        *,
        mtp: bool = False,
        images: bool = False,
    ):
        self._mtp, self._images = mtp, images
        self._seats = seats
        self._lora = lora
        self._index_arrays = index_arrays
        self._rectangles = rectangles
        self._windows = windows
        self._block_size = block_size

    def build(self, plan: StepPlan, indices: Sequence[int]) -> ForwardInputs:
        """Return the inputs of the forward that computes these rows of the plan."""
        slots = [r.lora_slot for r in plan.rows]
        # Adjacent rows of one adapter are faster, and rows in the same order have the same sampling arrays.
        indices = sorted(indices, key=lambda i: (slots[i], i))
        whole = rows = [plan.rows[i] for i in indices]
        verifies = any(r.kind is RowKind.VERIFY or r.slack for r in rows)  # one kind of steps, so that few are traced
        mixed = verifies or any(r.piggybacked for r in rows)
        each = self._rows_of_each(whole) if verifies else 1
        if mixed:
            indices, rows = token_by_token(indices, rows, each, self._seats.padding)
        extent = self._extent(rows, mixed, each, chains=bool(plan.drafts))
        in_place = tuple([None if plan.drafts else self._contiguous(rows, pool) for pool in range(len(self._windows))])
        draws = self._draws(rows, extent.rows, mixed)
        adapters = [slots[i] for i in indices]
        route = self._lora.route(adapters + [adapters[-1]] * (extent.rows - len(rows)), extent.length)
        scores = self._seats.scores([r.seat for r in rows]) if rows[0].targets else -1
        operands = self._operands(rows, extent, draws, scores >= 0, verifies, route)
        shape = turns = None
        if verifies and self._index_arrays.keeps_states:
            padded_rows = coarse_count(len(whole), gathers=self._rectangles.gathers)
            shape, turns = self._index_arrays.turns(whole, padded_rows, extent.rows)
            operands.states = turns.for_forward()
        if verifies:
            starts = [plan.rows[i].start if r.slack else -1 for i, r in zip(indices, rows, strict=True)]
            operands.bounds = np.array(starts + [-1] * (extent.rows - len(rows)), np.int32)
            operands.drafts = drafts_of([r for r in whole if r.sample], len(draws.drawn_seats))
        masked = bool(plan.masked) and not set(plan.masked).isdisjoint(indices)
        if self._mtp:
            operands.following = padded([(*r.tokens[1:], r.following) for r in rows], extent.rows, extent.length)
        key = StepKey(
            extent.rows,
            extent.length,
            tuple([0 if run else width for run, width in zip(in_place, extent.widths, strict=True)]),
            verifies or (extent.length == 1 and any(r.tokens[0] == CARRY for r in rows)),
            min(draws.seats) < self._seats.padding,
            draws.flags,
            route.layout,
            self._rectangles.common_offset(rows),
            scores,
            len(draws.drawn_seats) if draws.picked else 0,
            operands.drafts[0].shape[1] if verifies else 0,
            rows[0].pooling is not None,
            rows[0].start > 0 if self._index_arrays.keeps_states else None,
            plan.proposes and min(draws.seats) < self._seats.padding and not masked if self._mtp else None,
            shape,
            masked,
            shows := self._images and any(r.images for r in rows),
            self._images and not shows and any(r.shift for r in rows),
            each,
            plan.drafts,
        )
        every = rows
        if draws.picked:
            indices, rows = [indices[at] for at in draws.picked], [rows[at] for at in draws.picked]
        return ForwardInputs(key, operands, draws.arrays, route, indices, rows, every, in_place, mixed, verifies, turns)

    def _rows_of_each(self, rows: Sequence[Row]) -> int:
        """Return how many rows of one token each row is padded to, so that the keys of a sequence are read once.

        It is 1 if each token reads its keys by itself: if the model keeps states, if keys are not gathered and no
        kernel answers groups of rows, or if padding would add more than a quarter to the number of rows.
        """
        gathers = self._rectangles.gathers
        if not (gathers or self._rectangles.groups) or self._index_arrays.keeps_states:
            return 1
        longest = max([len(row.tokens) for row in rows])
        each = longest if gathers else group_size(longest)
        together = self._coarse_rows(len(rows) * each, each)
        apart = self._coarse_rows(sum([len(row.tokens) for row in rows]), 1)
        return each if 4 * together <= 5 * apart else 1

    def _coarse_rows(self, rows: int, each: int, length: int = 1) -> int:
        """Return the padded number of rows of a mixed step, in which `each` adjacent rows belong to one sequence.

        length: the tokens of a row.
        """
        gathers = self._rectangles.gathers
        padded = each * coarse_count(rows // each, gathers=gathers)
        if each > 1 and gathers:  # a gather serves `each` rows; the kernel accepts a shorter last group
            return padded
        return row_count(padded, self._rectangles.good_counts(length))

    def _extent(self, rows: Sequence[Row], mixed: bool, each: int, *, chains: bool) -> Extent:
        """Return the padded sizes of a forward of these rows.

        each: the number of adjacent rows that belong to one sequence; chains: whether each row draws several tokens.
        """
        longest = max([len(r.tokens) for r in rows])
        length = drafting_length(longest) if chains else self._rectangles.length(longest)
        gathers, coarse = self._rectangles.gathers, mixed or chains
        if coarse:
            count = self._coarse_rows(len(rows), each, length)
        else:
            count = row_count(len(rows), self._rectangles.good_counts(length))
        blocks = [most_blocks_read(rows, self._block_size, window) for window in self._windows]
        if chains:
            widths = [drafting_width(n) for n in blocks]
        else:
            widths = [coarse_width(n, gathers=gathers) if coarse else table_width(n) for n in blocks]
        return Extent(count, length, widths)

    def _draws(self, rows: Sequence[Row], count: int, mixed: bool) -> Draws:
        """Return which of `count` padded rows draw, and how."""
        padding = self._seats.padding
        seats = [r.seat if r.sample else padding for r in rows] + [padding] * (count - len(rows))
        picked = [at for at, seat in enumerate(seats) if seat < padding] if mixed else []
        pads = max(min(coarse_count(len(picked), gathers=self._rectangles.gathers), padding) - len(picked), 0)
        drawn_seats = [seats[at] for at in picked] + [padding] * pads if picked else seats
        if min(seats) == padding:
            return Draws(seats, picked, drawn_seats, SamplingFlags(), [])
        flags, arrays = self._seats.sampling(tuple(drawn_seats), coarse=mixed)
        return Draws(seats, picked, drawn_seats, flags, arrays)

    def _operands(
        self, rows: list[Row], extent: Extent, draws: Draws, scored: bool, verifies: bool, route: Route
    ) -> Operands[Numbers]:
        """Return the numbers of a forward, except for those about drafts. scored: whether prompts are scored."""
        count, length, widths = extent
        tokens, offset, places, last = self._index_arrays.of(rows, count, length, widths, verifies)
        seats = tuple(draws.seats)
        own = self._index_arrays.once(("seats", seats), lambda: np.array(seats, np.int32))
        operands = Operands(tokens, offset, last, own, places, adapters=route.ids)
        if self._index_arrays.keeps_states and not verifies:
            assert {len(r.tokens) for r in rows} == {length}, "a state has no padding"
            operands.states = self._index_arrays.states(rows, count)
        if scored:
            operands.targets = padded([r.targets for r in rows], count, length)
        if draws.picked:
            operands.picked = np.array(draws.padded_picks, np.int32)
            operands.picked_seats = np.array(draws.drawn_seats, np.int32)
        return operands

    def _contiguous(self, rows: Sequence[Row], pool: int) -> tuple[int, int] | None:
        """Return the range (first, end) of pool-local blocks that a single chunk can read in place; else None."""
        if len(rows) > 1 or len(rows[0].tokens) <= max(1, self._rectangles.fused_length):
            return None
        store, _, by_outputs = inplace.writing()
        if by_outputs or (store is not None and self._rectangles.common_offset(rows) is None):
            return None  # arrays that kernels write are read by index
        n = blocks_read(rows[0], self._block_size, self._windows[pool])
        if n < VIEW_BLOCKS:
            return None
        table = self._index_arrays.table(rows[0], pool, n)
        if table[n - 1] - table[0] != n - 1 or table != list(range(table[0], table[0] + n)):
            return None
        return table[0], table[0] + n
