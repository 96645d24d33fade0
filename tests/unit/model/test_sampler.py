"""The sampler: draws follow the distribution that was asked for, depend on nothing else, and logprobs are true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_xtc
from msgspec import structs

from mlx_tandem.engine.plan import NOT_A_NUMBER, Seating
from mlx_tandem.model.step.sampler import (
    SamplerOutput,
    SamplingFlags,
    TokenCounts,
    gumbel_noise,
    row_key,
    sample,
    score,
    xtc_draw,
)
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.types import SamplingParams

Array = np.ndarray[Any, Any]
VOCAB = 40
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2.0, VOCAB).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One row: how it samples, what it has met, where it is."""

    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    choice: int = 0
    position: int = 1
    stop_ids: frozenset[int] = frozenset()


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})


def draw(logits: Array, cases: Sequence[Case], vocab: int = VOCAB) -> SamplerOutput:
    """One batch, through the same seats as in the engine. `logits`: of all rows, or of each."""
    seats = Seats(len(cases), vocab)
    for i, c in enumerate(cases):
        seats.take(Seating(i, c.params, c.choice, len(c.prompt), c.prompt + c.output, c.stop_ids))
    indices = tuple(range(len(cases)))
    flags = seats.flags(indices)
    seen = TokenCounts.of(seats.seen(flags), mx.array(indices))
    batch = np.broadcast_to(logits, (len(cases), vocab)).astype(np.float32)
    position = mx.array([c.position for c in cases], mx.int32)
    return sample(mx.array(batch), position, seats.arrays(indices, flags), flags, seen)


def tokens(logits: Array, cases: Sequence[Case], vocab: int = VOCAB) -> list[int]:
    return list(listed(draw(logits, cases, vocab).tokens))


def listed(array: mx.array | None) -> Any:
    assert array is not None
    return array.tolist()


# --- the oracle --------------------------------------------------------------------------------------------------


def distribution(logits: Array, case: Case) -> Array:
    """What is drawn from, in float64: penalties, allowed tokens and bias, temperature, min-p, top-k, top-p and XTC, in
    this order."""
    p = case.params
    z = logits.astype(np.float64).copy()
    counts = np.bincount(case.output, minlength=len(z)) if case.output else np.zeros(len(z))
    history = case.prompt + case.output
    met = np.bincount(history[-p.repetition_context :], minlength=len(z)) > 0
    z[met] = np.where(z[met] > 0, z[met] / p.repetition_penalty, z[met] * p.repetition_penalty)
    z -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    for token, bias in p.logit_bias:
        z[token] += bias
    if p.allowed_token_ids:
        z[np.setdiff1d(np.arange(len(z)), p.allowed_token_ids)] = -np.inf
    if p.greedy:
        return (np.arange(len(z)) == z.argmax()).astype(np.float64)
    w = np.exp((z - z.max()) / p.temperature)
    w[w < p.min_p] = 0.0
    order = np.argsort(-w, kind="stable")
    if p.top_k:
        w[order[p.top_k :]] = 0.0
    w /= w.sum()
    before = np.cumsum(w[order]) - w[order]
    w[order[before >= p.top_p]] = 0.0
    left = np.where(_top_choices(z, w > 0, p), 0.0, w)
    return (1 - p.xtc_probability) * w / w.sum() + p.xtc_probability * left / left.sum()


def _top_choices(z: Array, kept: Array, p: SamplingParams) -> Array:
    """Return the tokens that XTC leaves out: those over the threshold at temperature 1, but for the least likely."""
    share = np.where(kept, np.exp(z - z.max()), 0.0)
    share /= share.sum()
    above = share > p.xtc_threshold
    out = above & (share > share[above].min(initial=np.inf))
    out[list(p.xtc_kept)] = False
    return out


def assert_follows(drawn: Sequence[int], p: Array) -> None:
    """Pearson's chi-square over the tokens expected often enough; never one that is excluded."""
    counts = np.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0, "a token outside of the truncation was drawn"
    expected = p * len(drawn)
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    if degrees == 0:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the quantile at 4.5 standard deviations, about 1 in 300,000.
    bound = degrees * (1 - 2 / (9 * degrees) + 4.5 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} with {degrees} degrees of freedom, over {bound:.1f}"


TRUNCATIONS = {
    "plain": params(),
    "cool": params(temperature=0.5),
    "hot": params(temperature=2.0),
    "top_k 1": params(top_k=1),
    "top_k 5": params(top_k=5),
    "top_k over the vocabulary": params(top_k=1000),
    "top_p 0.9": params(top_p=0.9),
    "top_p 0.5": params(top_p=0.5),
    "top_p 0.1": params(top_p=0.1),
    "top_p tiny": params(top_p=1e-6),
    "min_p 0.1": params(min_p=0.1),
    "min_p 1": params(min_p=1.0),
    "all": params(temperature=1.3, top_k=12, top_p=0.85, min_p=0.02),
    "top_k and top_p": params(temperature=0.8, top_k=6, top_p=0.7),
    "min_p and top_p, hot": params(temperature=2.0, min_p=0.05, top_p=0.6),
    "penalties": params(repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4),
    "bias": params(logit_bias=((3, 4.0), (7, -100.0))),
    "repetition in a window": params(repetition_penalty=1.8, repetition_context=4),
    "a window, and penalties of the output": params(
        repetition_penalty=0.6, repetition_context=7, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "a window longer than all tokens": params(repetition_penalty=1.8, repetition_context=600),
    "allowed": params(allowed_token_ids=(3, 5, 7, 9, 39), logit_bias=((3, 4.0),)),
    "allowed and truncated": params(allowed_token_ids=tuple(range(0, 40, 2)), top_k=7, top_p=0.8),
    "xtc": params(xtc_probability=0.5, xtc_threshold=0.05),
    "xtc always": params(xtc_probability=1.0, xtc_threshold=0.12),
    "xtc, cool": params(xtc_probability=0.7, xtc_threshold=0.02, temperature=0.5),
    "xtc, hot": params(xtc_probability=0.7, xtc_threshold=0.05, temperature=1.7, min_p=0.05),
    "xtc of a nucleus": params(xtc_probability=0.6, xtc_threshold=0.1, top_p=0.8, top_k=12),
    "xtc that leaves nothing out": params(xtc_probability=1.0, xtc_threshold=0.6),
    "xtc with tokens that stay": params(
        xtc_probability=0.8, xtc_threshold=0.03, xtc_kept=tuple(np.argsort(-LOGITS)[[0, 2]].tolist())
    ),
    "everything": params(
        temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=0.8, presence_penalty=-0.5,
        frequency_penalty=0.3, logit_bias=((3, 2.0), (11, -2.0)),
    ),
}  # fmt: skip
PROMPT, OUTPUT = (1, 2, 3, 4, 5, 2), (3, 9, 9, 9, 12)


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


def _uniform(keys: Sequence[tuple[int, int]], positions: Sequence[int], vocab: int) -> Array:
    g = gumbel_noise(mx.array(np.array(keys, np.uint32)), mx.array(list(positions), mx.int32), vocab)
    return np.exp(-np.exp(-np.array(g).astype(np.float64)))


def _noise_along(axis: str, n: int, vocab: int) -> Array:
    """[n, vocab] uniforms whose rows differ in one thing."""
    if axis == "seed":
        return _uniform([row_key(i, 0) for i in range(n)], [17] * n, vocab)
    if axis == "choice":
        return _uniform([row_key(3, i) for i in range(n)], [17] * n, vocab)
    return _uniform([row_key(3, 0)] * n, range(n), vocab)


@pytest.mark.parametrize("axis", ["seed", "choice", "position"])
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
    small, large = _uniform([row_key(1, 0)], [5], 100), _uniform([row_key(1, 0)], [5], 1000)
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


# --- flags -------------------------------------------------------------------------------------------------------


def test_a_batch_of_greedy_rows_needs_nothing() -> None:
    seats = Seats(2, VOCAB)
    seats.take(Seating(0, params(temperature=0.0, top_p=0.5, top_k=4, min_p=0.1), 0, 1, (0,)))
    assert seats.flags((0, 2)) == SamplingFlags()


def test_a_seat_keeps_nothing_of_who_sat_there_before() -> None:
    used, fresh = Seats(1, VOCAB), Seats(1, VOCAB)
    used.take(Seating(0, TRUNCATIONS["everything"], 3, 2, (1, 2, 3, 3)))
    for p in (params(), params(presence_penalty=1.0)):
        for seats in (used, fresh):
            seats.take(Seating(0, p, 0, 1, (5, 6)))
        assert used.flags((0,)) == fresh.flags((0,))
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
            assert np.array_equal(_top_choices(row.astype(np.float64), np.ones(VOCAB, bool), p), out)
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
        noise = _uniform(keys, list(positions), 32)
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
