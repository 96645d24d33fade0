"""Options of a draw: each does what it says, and only rows that have it pay for it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc
from msgspec import structs

from mlx_tandem.engine.plan import Seating
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags, TokenCounts, row_key, sample, score, xtc_draw
from mlx_tandem.model.step.seats import Seats
from tests.unit.model.draws import (
    LOGITS,
    RNG,
    TRUNCATIONS,
    VOCAB,
    Case,
    distribution,
    draw,
    listed,
    params,
    tokens,
    top_choices,
    uniform,
)

# --- flags -------------------------------------------------------------------------------------------------------


def test_a_batch_of_greedy_rows_needs_nothing() -> None:
    seats = Seats(2, VOCAB)
    seats.take(Seating(0, params(temperature=0.0, top_p=0.5, top_k=4, min_p=0.1), 0, 1, (0,)))
    assert seats.flags((0, 2)) == SamplingFlags()


def test_a_seat_keeps_nothing_of_who_sat_there_before() -> None:
    used, fresh = Seats(1, VOCAB), Seats(1, VOCAB)
    crowded = structs.replace(
        TRUNCATIONS["everything"],
        repetition_penalty=1.5,
        repetition_context=7,
        xtc_probability=0.5,
        xtc_threshold=0.125,
        xtc_kept=(3, 4),
        allowed_token_ids=(1, 2, 3),
        logit_bias=((1, 2.0),),
        min_tokens=9,
        logprobs=3,
        prompt_logprobs=4,
    )
    own = [
        params(),
        params(temperature=0.0),
        params(min_p=0.25),
        params(xtc_probability=0.25),
        params(allowed_token_ids=(5,)),
        params(logit_bias=((6, 1.0),)),
        params(min_tokens=3),
        params(logprobs=0),
        params(repetition_penalty=1.25),
        params(presence_penalty=1.0),
    ]
    for p in own:
        used.take(Seating(0, crowded, 3, 2, (1, 2, 3, 3), frozenset({1})))
        for seats in (used, fresh):
            seats.take(Seating(0, p, 0, 1, (5, 6), frozenset({2})))
        assert used.flags((0,)) == fresh.flags((0,))
        assert used.scores((0,)) == fresh.scores((0,)) == -1
        pairs = zip(
            used.arrays((0,), used.flags((0,))).flatten(), fresh.arrays((0,), fresh.flags((0,))).flatten(), strict=True
        )
        assert all(mx.array_equal(a, b) for a, b in pairs)
    assert used.prompt_seen is not None
    assert used.output_count is not None
    assert fresh.prompt_seen is not None
    assert fresh.output_count is not None
    assert mx.array_equal(used.prompt_seen[0], fresh.prompt_seen[0])
    assert mx.array_equal(used.output_count[0], fresh.output_count[0])


# --- min_tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_what_stops_is_not_drawn_before_min_tokens(name: str) -> None:
    """Beside rows that may draw it. Whoever would have drawn something else still draws that."""
    likely = frozenset(np.argsort(-LOGITS)[:5].tolist())
    own = TRUNCATIONS[name]

    def case(seed: int, least: int, position: int) -> Case:
        return Case(structs.replace(own, seed=seed, min_tokens=least), (0, 1), position=position, stop_ids=likely)

    drawn = {
        where: tokens(LOGITS, [case(seed, least, position) for seed in range(200)])
        for where, (least, position) in {"free": (0, 3), "before": (2, 3), "after": (2, 4), "later": (0, 4)}.items()
    }
    assert likely & set(drawn["free"])
    assert not likely & set(drawn["before"])
    assert drawn["after"] == drawn["later"]
    if not (
        own.top_k or own.min_p or own.top_p < 1.0 or own.xtc_probability
    ):  # these look at how likely the others are
        assert all(b == f for b, f in zip(drawn["before"], drawn["free"], strict=True) if f not in likely)
    beside = tokens(LOGITS, [case(seed, 2 * (seed % 2), 3) for seed in range(200)])
    assert beside == [drawn["before" if seed % 2 else "free"][seed] for seed in range(200)]


def test_only_rows_that_have_min_tokens_cost_something() -> None:
    seats = Seats(3, VOCAB)
    seats.take(Seating(0, params(min_tokens=0), 0, 1, (0,), frozenset({3})))
    seats.take(Seating(1, params(min_tokens=4), 0, 1, (0,), frozenset()))
    seats.take(Seating(2, params(min_tokens=4), 0, 1, (0,), frozenset({3})))
    assert [seats.flags((i,)).min_tokens for i in range(3)] == [False, False, True]
    seats.take(Seating(2, params(), 0, 1, (0,), frozenset({3})))
    assert not seats.flags((0, 1, 2)).min_tokens


# --- windows of the repetition penalty -----------------------------------------------------------------------------


@given(
    windows=st.lists(st.sampled_from([0, 1, 2, 3, 7, 20, 40]), min_size=1, max_size=4),
    prompts=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=9), min_size=4, max_size=4),
    late=st.sampled_from([0, 30]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_a_window_slides_with_what_is_drawn(windows: list[int], prompts: list[list[int]], late: int, seed: int) -> None:
    """Step by step as in the engine, rows with other windows or none beside, and one that makes room for more."""
    rng, vocab = np.random.default_rng(seed), 8
    seats = Seats(5, vocab)
    own = [params(temperature=0.0, repetition_penalty=1.5, repetition_context=w) for w in windows]
    histories = [list(prompts[i]) for i in range(len(windows))]
    for i, (p, history) in enumerate(zip(own, histories, strict=True)):
        seats.take(Seating(i, p, 0, len(history), tuple(history)))
    rows = mx.arange(len(own))
    for step in range(24):
        if late and step == 5:
            last = params(temperature=0.0, repetition_penalty=1.5, repetition_context=late)
            seats.take(Seating(4, last, 0, 1, (0,)))
        logits = rng.normal(0, 1, (len(own), vocab)).astype(np.float32)
        flags = seats.flags(range(len(own)))
        arrays = seats.seen(flags)
        seen = TokenCounts.of(arrays, rows)
        assert seen is not None
        drawn = sample(mx.array(logits), rows, seats.arrays(range(len(own)), flags), flags, seen).tokens
        seats.remember(seen.after(arrays, rows, drawn))
        for i, (p, history) in enumerate(zip(own, histories, strict=True)):
            want = distribution(logits[i], Case(p, tuple(history))).argmax()
            assert listed(drawn)[i] == want, (step, i, history)
            history.append(int(want))


def test_only_rows_that_have_a_window_cost_something() -> None:
    seats = Seats(3, VOCAB)
    seats.take(Seating(0, params(repetition_penalty=1.2), 0, 1, (0,)))
    seats.take(Seating(1, params(repetition_context=8), 0, 1, (0,)))  # nothing is penalised
    assert not seats.flags((0, 1)).window
    assert len(seats.seen(seats.flags((0, 1)))) == 2
    seats.take(Seating(2, params(repetition_penalty=1.2, repetition_context=8), 0, 1, (0,)))
    assert seats.flags((0, 2)).window
    assert not seats.flags((0, 1)).window


# --- XTC -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [(), (0, 3, 11)])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.3, 0.5])
def test_xtc_leaves_out_what_mlx_lm_does(threshold: float, special: tuple[int, ...]) -> None:
    for scale in (0.1, 1.0, 3.0):
        logits = RNG.normal(0, scale, (50, VOCAB)).astype(np.float32)
        theirs = np.isinf(np.array(apply_xtc(mx.array(logits), 1.0, threshold, list(special))))
        p = params(xtc_probability=1.0, xtc_threshold=threshold, xtc_kept=special)
        for row, out in zip(logits, theirs, strict=True):
            assert np.array_equal(top_choices(row.astype(np.float64), np.ones(VOCAB, bool), p), out)
        drawn = tokens(logits, [Case(structs.replace(p, seed=i)) for i in range(50)])
        assert not theirs[np.arange(50), drawn].any()


def test_xtc_at_a_low_temperature_draws_from_what_is_left() -> None:
    """What is left would be 0 beside what is left out, in float32."""
    p = params(xtc_probability=1.0, xtc_threshold=0.01, temperature=0.01, logprobs=0)
    logits = np.array([5.0, 4.0, 3.0, 0.0, 0.0], np.float32)
    for other in (params(seed=1), params(top_k=2), params(min_p=0.9)):
        drawn = draw(logits, [Case(p), Case(other)], 5)
        assert listed(drawn.tokens)[0] == 2
        assert listed(drawn.sampled_logprob)[0] == pytest.approx(0.0, abs=1e-6)


def test_whether_xtc_applies_depends_on_seed_choice_and_position_alone() -> None:
    """Uniform, and not what the noise of any token is."""
    n = 20_000
    for keys, positions in (
        ([row_key(i, 0) for i in range(n)], [5] * n),
        ([row_key(3, i) for i in range(n)], [5] * n),
        ([row_key(3, 0)] * n, range(n)),
    ):
        key, position = mx.array(np.array(keys, np.uint32)), mx.array(list(positions), mx.int32)
        u = np.array(xtc_draw(key, position))[:, 0].astype(np.float64)
        assert u.min() > 0.0 and u.max() <= 1.0
        counts = np.bincount((u * 50).astype(int).clip(0, 49), minlength=50)
        assert ((counts - n / 50) ** 2 / (n / 50)).sum() < 49 + 6 * (2 * 49) ** 0.5
        noise = uniform(keys, list(positions), 32)
        assert np.abs(((u - 0.5)[:, None] * (noise - 0.5)).mean(0)).max() * 12 < 5 / n**0.5
        assert abs(((u[1:] - 0.5) * (u[:-1] - 0.5)).mean()) * 12 < 5 / n**0.5


def test_only_rows_that_draw_with_xtc_cost_something() -> None:
    seats = Seats(3, VOCAB)
    seats.take(Seating(0, params(xtc_threshold=0.2, xtc_kept=(1,)), 0, 1, (0,)))
    seats.take(Seating(1, params(temperature=0.0, xtc_probability=1.0), 0, 1, (0,)))
    seats.take(Seating(2, params(xtc_probability=0.1), 0, 1, (0,)))
    assert [seats.flags((i,)).xtc for i in range(3)] == [False, False, True]


# --- allowed tokens ------------------------------------------------------------------------------------------------


def test_no_other_than_allowed_tokens_are_drawn_beside_rows_that_may_draw_all() -> None:
    allowed = (2, 3, 17)
    cases = [Case(params(seed=i, allowed_token_ids=allowed if i % 2 else ())) for i in range(400)]
    drawn = tokens(LOGITS, cases)
    assert set(drawn[1::2]) == set(allowed)
    assert drawn[::2] == tokens(LOGITS, cases[::2])
    assert len(set(drawn[::2])) > 10
    best = max(allowed, key=lambda t: LOGITS[t])
    assert tokens(LOGITS, [Case(params(temperature=0.0, allowed_token_ids=allowed))] * 2) == [best] * 2


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 7, VOCAB])
def test_scores_are_those_of_the_model_s_distribution(k: int) -> None:
    logits = RNG.normal(0, 3.0, (2, 5, VOCAB)).astype(np.float32)
    targets = RNG.integers(0, VOCAB, (2, 5))
    logprob, rank, *top = (np.array(a) for a in score(mx.array(logits), mx.array(targets.astype(np.int32)), k))
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    own = np.take_along_axis(exact, targets[..., None], -1)
    assert np.allclose(logprob, own[..., 0], atol=1e-5)
    assert np.array_equal(rank, (exact > own).sum(-1) + 1)
    assert len(top) == (2 if k else 0)
    if k:
        order = np.argsort(-exact, -1)[..., :k]
        assert np.array_equal(top[0], order)
        assert np.allclose(top[1], np.take_along_axis(exact, order, -1), atol=1e-5)
