"""Tests of the kernels that begin and end verifying steps, against MLX's operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.plan import CARRY, Row, RowKind
from mlx_tandem.model.ops.sampling.drafts import Accept, Settle
from mlx_tandem.model.step.rows import Drafts, drafts_of, places_at, settled
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

SEATS = 7
"""Number of seats; the last one is for rows that do not count."""


def integers(rng: np.random.Generator, low: int, high: int, *shape: int) -> mx.array:
    return mx.array(rng.integers(low, high, shape).astype(np.int32))


@settings(max_examples=40)
@given(seed=st.integers(0, 1 << 30), order=st.sampled_from(shim.ORDERS))
def test_rows_behind_drafts_begin_where_their_seat_is(seed: int, order: shim.Order) -> None:
    rng = np.random.default_rng(seed)
    rows, width, block = int(rng.integers(1, 200)), int(rng.integers(2, 6)), int(rng.choice([8, 16]))
    last_tokens = integers(rng, 0, 100, SEATS)
    bounds = rng.integers(5, width * block, rows)
    behind = rng.integers(0, 5, SEATS)  # how far the newest token of each seat is behind its bound
    seats = rng.integers(0, SEATS, rows)
    newest = np.full(SEATS, -1)
    newest[seats] = bounds - behind[seats]
    bounds = newest[seats] + behind[seats]  # rows of one seat have one bound
    floats = rng.random(rows) < 0.5
    given_bounds = mx.array(np.where(floats, bounds, -1).astype(np.int32))
    offset = mx.array(bounds.astype(np.int32))
    tokens = np.where(rng.random((rows, 1)) < 0.5, CARRY, rng.integers(0, 100, (rows, 1)))
    tables = integers(rng, 0, 50, rows, width)
    places = mx.array(newest.astype(np.int32))
    sent = mx.array(tokens.astype(np.int32)), offset, given_bounds, mx.array(seats.astype(np.int32)), tables
    begun, at, slots = Settle(shim.maker(order))(*sent, last_tokens, places, block)
    expected_at = settled(offset, given_bounds, places[sent[3]])
    expected_slots, _ = places_at(expected_at, [mx.zeros(rows, mx.int32), tables], [None], block)
    expected = mx.where(sent[0] == CARRY, last_tokens[sent[3]][:, None], sent[0])
    for own, other in ((begun, expected), (at, expected_at), (slots, expected_slots)):
        assert own.shape == other.shape and mx.array_equal(own, other)


@settings(max_examples=60)
@given(seed=st.integers(0, 1 << 30), order=st.sampled_from(shim.ORDERS))
def test_the_newest_token_of_a_seat_is_that_behind_its_accepted_drafts(seed: int, order: shim.Order) -> None:
    rng = np.random.default_rng(seed)
    own = rng.permutation(SEATS - 1)[: rng.integers(1, SEATS)].tolist()
    rows = []
    for seat in own:
        kind = RowKind.VERIFY if rng.random() < 0.8 else RowKind.DECODE
        tokens = tuple(rng.integers(0, 3, rng.integers(2, 7) if kind is RowKind.VERIFY else 1).tolist())
        rows.append(Row(kind, seat, seat, 0, 0, tokens, ((),), True))
    seats = [row.seat for row in rows for _ in row.tokens]
    seats += [SEATS - 1] * int(rng.integers(0, 3))
    drawn = integers(rng, -1, 3, len(seats))
    position = integers(rng, 0, 100, len(seats))
    last_tokens, last_places = integers(rng, 0, 100, SEATS), integers(rng, 0, 100, SEATS)
    drafts = Drafts(*map(mx.array, drafts_of(rows, len(seats))))
    at = mx.array(np.array(seats, np.int32))
    got = Accept(shim.maker(order))(drawn, position, at, drafts, last_tokens, last_places)
    token = mx.maximum(drawn, 0)
    _, newest = drafts.accept(token, at, SEATS - 1)
    for own_array, before, values in zip(got, (last_tokens, last_places), (token, position), strict=True):
        expected = before + 0
        expected[newest] = values
        assert mx.array_equal(own_array[:-1], expected[:-1])
