"""The sampler: draws follow the distribution that was asked for, depend on nothing else, and logprobs are true."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.engine.plan import NOT_A_NUMBER, Seating
from mlx_tandem.model.ops.sampling import sampler
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags, gumbel_noise, row_key
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.types import SamplingParams
from tests.unit.model.draws import (
    LOGITS,
    OUTPUT,
    PROMPT,
    RNG,
    TRUNCATIONS,
    VOCAB,
    Array,
    Case,
    assert_follows,
    distribution,
    draw,
    listed,
    params,
    tokens,
    uniform,
)


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_draws_follow_their_distribution(name: str) -> None:
    """Over seeds at one position, and over positions of one seed."""
    p = TRUNCATIONS[name]
    n = 6000
    case = Case(p, PROMPT, OUTPUT, position=7)
    want = distribution(LOGITS, case)
    assert_follows(tokens(LOGITS, [replace(case, params=_seeded(p, i)) for i in range(n)]), want)
    assert_follows(tokens(LOGITS, [replace(case, position=i) for i in range(n)]), want)


def _seeded(p: SamplingParams, seed: int) -> SamplingParams:
    values = {f: getattr(p, f) for f in p.__struct_fields__}
    return SamplingParams(**{**values, "seed": seed})


def test_a_peaked_distribution_is_not_bent() -> None:
    """Probabilities of 1e-3 beside 0.99: the float32 noise has enough of a tail."""
    logits = np.log(np.array([0.99, 5e-3, 3e-3, 1.5e-3, 5e-4], np.float64)).astype(np.float32)
    drawn = tokens(logits, [Case(params(seed=i)) for i in range(60_000)], 5)
    assert_follows(drawn, distribution(logits, Case(params())))


def test_ties_are_drawn_alike() -> None:
    logits = np.zeros(8, np.float32)
    assert_follows(tokens(logits, [Case(params(seed=i)) for i in range(8000)], 8), np.full(8, 1 / 8))


def test_greedy_is_the_likeliest_whatever_truncation_is_asked_for() -> None:
    logits = RNG.normal(0, 1, (200, VOCAB))
    variants = [
        params(temperature=0.0),
        params(top_p=0.0, seed=3),
        params(temperature=1.7, top_p=0.0, top_k=5, min_p=0.2, xtc_probability=1.0, xtc_threshold=0.01),
        params(temperature=0.0, top_k=3, top_p=0.2, min_p=0.5, seed=9),
        params(temperature=0.0, top_p=1e-6),
    ]
    for p in variants:
        assert tokens(logits, [Case(p)] * 200) == logits.argmax(1).tolist()
    # and beside rows that are not greedy
    mixed = [Case(params(temperature=0.0) if i % 2 else params(top_p=0.9, top_k=4, seed=i)) for i in range(200)]
    assert tokens(logits, mixed)[1::2] == logits.argmax(1).tolist()[1::2]


def test_greedy_respects_bias_and_penalties() -> None:
    best, second = np.argsort(-LOGITS)[:2].tolist()
    assert tokens(LOGITS, [Case(params(temperature=0.0, logit_bias=((best, -100.0),)))]) == [second]
    assert tokens(LOGITS, [Case(params(temperature=0.0, presence_penalty=2.0))]) == [best]
    small = np.array([1.0, 0.9, 0.1], np.float32)
    for p, output, want in (
        (params(temperature=0.0, presence_penalty=0.2), (0,), 1),
        (params(temperature=0.0, frequency_penalty=0.05), (0,), 0),
        (params(temperature=0.0, frequency_penalty=0.05), (0, 0, 0), 1),
        (params(temperature=0.0, repetition_penalty=1.5), (0,), 1),
    ):
        assert tokens(small, [Case(p, (2,), output)], 3) == [want]
    # A repetition penalty counts the prompt too; presence and frequency do not.
    assert tokens(small, [Case(params(temperature=0.0, repetition_penalty=1.5), (0,))], 3) == [1]
    assert tokens(small, [Case(params(temperature=0.0, presence_penalty=0.2), (0,))], 3) == [0]
    # Negative logits of met tokens fall, too.
    assert tokens(np.array([-1.0, -1.1], np.float32), [Case(params(temperature=0.0, repetition_penalty=1.5))], 2) == [1]


# --- independence ------------------------------------------------------------------------------------------------


def test_a_draw_does_not_depend_on_neighbours_or_its_place_in_the_batch() -> None:
    """Alone, reversed, and beside rows that switch every other mechanism on."""
    cases = [
        Case(_seeded(p, i), PROMPT, OUTPUT, choice=i % 3, position=5 + i) for i, p in enumerate(TRUNCATIONS.values())
    ]
    cases += [Case(params(seed=i, logprobs=5)) for i in range(4)]
    logits = RNG.normal(0, 2, (len(cases), VOCAB)).astype(np.float32)
    together = tokens(logits, cases)
    assert tokens(logits[::-1], cases[::-1]) == together[::-1]
    for i, case in enumerate(cases):
        assert tokens(logits[i], [case]) == [together[i]]
        assert tokens(logits[i], [case] * 5) == [together[i]] * 5


def test_choices_seeds_and_positions_draw_their_own() -> None:
    flat = np.zeros(1000, np.float32)
    base = Case(params(seed=5), position=3)
    variants = [
        base,
        replace(base, choice=1),
        replace(base, position=4),
        Case(params(seed=6), position=3),
        Case(params(seed=-5), position=3),
        Case(params(seed=5 + 2**32), position=3),
        Case(params(seed=2**63 - 1), position=3),
        Case(params(seed=-(2**63)), position=3),
    ]
    assert len(set(tokens(flat, variants, 1000))) == len(variants)
    assert tokens(flat, variants, 1000) == tokens(flat, variants, 1000)


def test_keys_of_seeds_and_choices_do_not_meet() -> None:
    keys = {row_key(seed, choice) for seed in [*range(-2000, 2000), 2**63 - 1] for choice in range(16)}
    assert len(keys) == 4001 * 16


# --- the noise ---------------------------------------------------------------------------------------------------


def _noise_along(axis: str, n: int, vocab: int) -> Array:
    """[n, vocab] uniforms whose rows differ in one thing."""
    if axis == "seed":
        return uniform([row_key(i, 0) for i in range(n)], [17] * n, vocab)
    if axis == "choice":
        return uniform([row_key(3, i) for i in range(n)], [17] * n, vocab)
    if axis in ("first word", "second word"):
        return uniform([(i, 5) if axis == "first word" else (5, i) for i in range(n)], [17] * n, vocab)
    return uniform([row_key(3, 0)] * n, range(n), vocab)


@pytest.mark.parametrize("axis", ["seed", "choice", "position", "first word", "second word"])
def test_noise_is_uniform_and_uncorrelated(axis: str) -> None:
    """Between rows and between tokens, near and far; 5 standard deviations are the bound."""
    n, vocab = 2000, 128
    u = _noise_along(axis, n, vocab)
    assert np.isfinite(u).all()
    count = u.size
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / count) ** 0.5
    assert abs(((u - 0.5) ** 2).mean() - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    deciles = np.bincount((u.reshape(-1) * 64).astype(int).clip(0, 63), minlength=64)
    assert ((deciles - count / 64) ** 2 / (count / 64)).sum() < 63 + 6 * (2 * 63) ** 0.5
    z = (u - 0.5) * 12**0.5
    for lag in (1, 2, 3, 16, 64, 1024):
        assert abs((z[lag:] * z[:-lag]).mean()) < 5 / ((n - lag) * vocab) ** 0.5, f"rows {lag} apart"
        if lag < vocab:
            assert abs((z[:, lag:] * z[:, :-lag]).mean()) < 5 / (n * (vocab - lag)) ** 0.5, f"tokens {lag} apart"
            diagonal = (z[1:, lag:] * z[:-1, :-lag]).mean()
            assert abs(diagonal) < 5 / ((n - 1) * (vocab - lag)) ** 0.5, f"next row, {lag} tokens on"
    # No token or row is luckier than the others.
    assert np.abs(z.mean(0)).max() < 5.5 / n**0.5
    assert np.abs(z.mean(1)).max() < 5.5 / vocab**0.5


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
def test_the_winner_does_not_tell_the_next_winner(axis: str) -> None:
    """Pairs of consecutive winners over 8 tokens are uniform over the 64 pairs."""
    winners = _noise_along(axis, 20_001, 8).argmax(1)
    pairs = np.bincount(winners[:-1] * 8 + winners[1:], minlength=64)
    expected = len(winners[1:]) / 64
    assert ((pairs - expected) ** 2 / expected).sum() < 63 + 6 * (2 * 63) ** 0.5


def test_the_noise_has_a_fine_tail() -> None:
    """The rare values by which unlikely tokens win are as many as they should be and not rounded to a grid."""
    n, vocab = 2000, 4096
    g = gumbel_noise(mx.array(np.array([row_key(i, 0) for i in range(n)], np.uint32)), mx.arange(n), vocab)
    assert np.isfinite(np.array(g)).all()
    exponential = np.exp(-np.array(g).astype(np.float64)).reshape(-1)
    for edge in (1e-3, 1e-4, 1e-5, 1e-6):
        expected = n * vocab * edge
        assert abs((exponential < edge).sum() - expected) < 5 * expected**0.5
    expected = n * vocab * np.exp(-10.0)
    assert abs((exponential > 10.0).sum() - expected) < 5 * expected**0.5
    rare = exponential[exponential < 1e-5] * 2**24
    assert np.abs(rare - np.round(rare)).mean() > 0.15  # 0.25 between the steps of a float32 near 1, 0 on them


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_s_size() -> None:
    small, large = uniform([row_key(1, 0)], [5], 100), uniform([row_key(1, 0)], [5], 1000)
    np.testing.assert_array_equal(small[0], large[0, :100])


# --- logprobs ----------------------------------------------------------------------------------------------------


def _log_softmax(z: Array) -> Array:
    z = z.astype(np.float64)
    return z - z.max() - np.log(np.exp(z - z.max()).sum())


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_logprobs_are_of_the_model_and_of_what_was_drawn_from(name: str) -> None:
    p = TRUNCATIONS[name]
    rows = 64
    logits = RNG.normal(0, 2, (rows, VOCAB)).astype(np.float32)
    asked = {f: getattr(p, f) for f in p.__struct_fields__} | {"logprobs": 0}
    cases = [Case(SamplingParams(**{**asked, "seed": i}), PROMPT, OUTPUT, position=i) for i in range(rows)]
    drawn = draw(logits, cases)
    assert listed(drawn.tokens) == tokens(logits, [replace(c, params=_seeded(p, i)) for i, c in enumerate(cases)])
    model, sampled = np.array(drawn.model_logprob), np.array(drawn.sampled_logprob)
    for i, (case, token) in enumerate(zip(cases, listed(drawn.tokens), strict=True)):
        assert model[i] == pytest.approx(_log_softmax(logits[i])[token], abs=2e-5)
        assert sampled[i] == pytest.approx(np.log(distribution(logits[i], case)[token]), abs=5e-5)


def test_a_greedy_draw_is_certain_and_its_model_logprob_is_not() -> None:
    drawn = draw(LOGITS, [Case(params(temperature=0.0, logprobs=0)), Case(params(logprobs=0, top_p=0.9))])
    assert listed(drawn.sampled_logprob)[0] == 0.0
    assert listed(drawn.model_logprob)[0] == pytest.approx(_log_softmax(LOGITS).max(), abs=2e-5)


@pytest.mark.parametrize("k", [1, 4, 5, 6, 20])
def test_the_likeliest_tokens_come_best_first(k: int) -> None:
    """Of the model's own distribution, whatever bias and truncation did; at least as many as were asked for."""
    drawn = draw(LOGITS, [Case(params(logprobs=k, top_k=1, logit_bias=((0, 50.0),))), Case(params())])
    assert len(listed(drawn.top_tokens)[0]) >= k
    assert listed(drawn.top_tokens)[0][:k] == np.argsort(-LOGITS)[:k].tolist()
    want = np.sort(_log_softmax(LOGITS))[::-1][:k]
    np.testing.assert_allclose(np.array(drawn.top_logprobs)[0, :k], want, atol=2e-5)


def test_more_logprobs_than_tokens_exist_are_all_tokens() -> None:
    logits = np.array([0.0, 2.0, 1.0], np.float32)
    drawn = draw(logits, [Case(params(logprobs=20))], 3)
    assert listed(drawn.top_tokens) == [[1, 2, 0]]


# --- what is not a number ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [params(temperature=0.0), params(), params(top_p=0.5, top_k=3, logprobs=2)])
@pytest.mark.parametrize("bad", ["one nan", "all nan", "inf", "all -inf"])
def test_a_row_that_is_not_finite_says_so_and_harms_nobody(p: SamplingParams, bad: str) -> None:
    logits = RNG.normal(0, 1, (3, VOCAB)).astype(np.float32)
    clean = tokens(logits, [Case(p)] * 3)
    logits[1] = {
        "one nan": np.where(np.arange(VOCAB) == 7, np.nan, logits[1]),
        "all nan": np.full(VOCAB, np.nan),
        "inf": np.where(np.arange(VOCAB) == 7, np.inf, logits[1]),
        "all -inf": np.full(VOCAB, -np.inf),
    }[bad]
    assert tokens(logits, [Case(p)] * 3) == [clean[0], NOT_A_NUMBER, clean[2]]


@pytest.mark.parametrize("vocab", [5, 333, 4099])
def test_a_single_nan_is_seen_wherever_it_is(vocab: int) -> None:
    places = sorted({0, 1, 7, 8, 31, 32, vocab // 2, vocab - 2, vocab - 1} & set(range(vocab)))
    logits = RNG.normal(0, 1, (len(places), vocab)).astype(np.float32)
    logits[np.arange(len(places)), places] = np.nan
    for p in (params(temperature=0.0), params(top_p=0.5)):
        assert tokens(logits, [Case(p)] * len(places), vocab) == [NOT_A_NUMBER] * len(places)


def test_a_token_that_is_ruled_out_is_not_an_error() -> None:
    logits = np.where(np.arange(VOCAB) % 2 == 0, LOGITS, -np.inf)
    drawn = tokens(logits, [Case(params(seed=i, top_p=0.95)) for i in range(500)])
    assert all(t % 2 == 0 for t in drawn)


def test_a_temperature_whose_noise_would_be_rounded_away_takes_the_likeliest() -> None:
    """Noise is added to logits, whose step in float32 is as large as it at such temperatures."""
    logits = LOGITS.copy()
    logits[[5, 9]] = 30.0
    assert set(tokens(logits, [Case(params(temperature=9e-5, seed=seed)) for seed in range(60)])) == {5}
    assert set(tokens(logits, [Case(params(temperature=1e-4, seed=seed)) for seed in range(60)])) == {5, 9}


def test_a_neighbour_s_top_p_gives_a_row_no_further_rounds() -> None:
    """Seven tokens in turn are drawn and rejected: more than a row with this top_p has rounds for."""
    p = mx.array([[0.5, 0.4, 0.05, 0.02, 0.01, 0.009, 0.006, 0.003, 0.002]])
    sums = mx.array([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]])  # the least likely comes first
    seats = Seats(1, p.shape[1])
    seats.take(Seating(0, params(top_p=0.85), 0, 1, (0,)))
    drawn = []
    for least in (0.85, 0.1):  # of the batch
        flags = SamplingFlags(noise=True, top_p_rounds=SamplingFlags.rounds_for(least), top_p_rows=1)
        arrays = seats.arrays((0,), flags)
        drawn.append(sampler._within_top_p(sums, p, mx.argmax(sums, -1), arrays, flags).item())
    assert drawn == [0, 0]  # the likeliest; with more rounds it would be token 1
