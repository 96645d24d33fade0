"""The test that compares versions: its errors, and what it finds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.training.evidence import BETS, PATIENCE, SPREAD, Comparison, Evidence


def wealth(evidence: Evidence) -> float:
    return evidence.reserve + sum(evidence.stakes)


@given(st.lists(st.floats(-1, 1), max_size=30))
def test_the_wealth_is_the_mixture_over_bets_and_beginnings(differences: list[float]) -> None:
    evidence = Evidence()
    for x in differences:
        evidence.add(x)
    n = len(differences)
    share = [PATIENCE / (PATIENCE + t) for t in range(n + 1)]
    expected = share[n] + sum(
        (share[t] - share[t + 1]) / len(BETS) * math.prod(1 + bet * x for x in differences[t:])
        for t in range(n)
        for bet in BETS
    )
    assert wealth(evidence) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), max_size=20))
def test_what_answers_better_never_looks_worse(pairs: list[tuple[float, float]]) -> None:
    worse, better = Evidence(), Evidence()
    for x, less in pairs:
        worse.add(x)
        better.add(max(-1.0, x - less))
    assert wealth(better) <= wealth(worse) * (1 + 1e-9)


def test_a_fair_bet_keeps_the_wealth_on_average() -> None:
    """Over all 2^8 courses of a coin."""
    total = 0.0
    for course in range(256):
        evidence = Evidence()
        for bit in range(8):
            evidence.add(1.0 if course >> bit & 1 else -1.0)
        total += wealth(evidence)
    assert total / 256 == pytest.approx(1.0)


def test_a_difference_is_scaled_by_those_before_it_and_harm_begins_behind_what_is_tolerated() -> None:
    comparison = Comparison()
    harm, gain = Evidence(), Evidence()
    squares = 0.0
    for n, (difference, tolerated) in enumerate([(2.0, 0.0), (-1.0, 0.5), (0.1, 0.0), (-9.0, 1.0), (-0.2, 0.3)]):
        usual = SPREAD * math.sqrt(squares / n) if n else 0.0
        behind = difference + tolerated
        harm.add(-behind / max(usual, abs(behind)))
        gain.add(difference / max(usual, abs(difference)))
        squares += difference**2
        comparison.add(difference, tolerated)
        assert (comparison.harm, comparison.gain) == (harm, gain), n
    assert (comparison.count, comparison.seen) == (5, 5)
    assert (comparison.squares, comparison.mean) == pytest.approx((squares, -8.1 / 5))
    comparison = Comparison()
    comparison.add(0.0)
    assert (comparison.harm.count, comparison.harm.suspicion) == (1, 1.0), "no difference says nothing"


def differences(rng: np.random.Generator, worse: float, n: int) -> Iterator[float]:
    p = rng.beta(0.4, 0.6, n)
    a, b = rng.binomial(8, p) / 8, rng.binomial(8, np.maximum(p - worse, 0)) / 8
    yield from (b - a).tolist()


def found(worse: float, n: int, seed: int, scale: float = 1.0) -> bool:
    comparison = Comparison()
    for d in differences(np.random.default_rng(seed), worse, n):
        comparison.add(d * scale)
        if comparison.harm.rejects(0.01):
            return True
    return False


def test_equal_versions_are_told_apart_as_seldom_as_promised() -> None:
    assert sum(found(0.0, 500, seed) for seed in range(100)) <= 4


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-3], ids=["0 to 1", "0 to 1000", "0 to 0.001"])
def test_a_version_that_is_worse_is_found_whatever_rewards_are_measured_in(scale: float) -> None:
    assert sum(found(0.1, 200, seed, scale) for seed in range(20)) >= 18


def test_a_change_late_in_a_long_run_is_found() -> None:
    late = 0
    for seed in range(10):
        rng, comparison = np.random.default_rng(seed), Comparison()
        for d in differences(rng, 0.0, 2000):
            comparison.add(d)
        for d in differences(rng, 0.1, 300):
            comparison.add(d)
        late += comparison.harm.rejects(0.01)
    assert late >= 9


def test_the_state_survives_being_written() -> None:
    comparison = Comparison()
    for d in differences(np.random.default_rng(1), 0.1, 50):
        comparison.add(d)
    assert msgspec.json.decode(msgspec.json.encode(comparison), type=Comparison) == comparison


def test_it_stays_finite() -> None:
    comparison = Comparison()
    for _ in range(3000):
        comparison.add(-1.0)
    assert math.isfinite(wealth(comparison.harm)) and comparison.harm.rejects(0.01)
    assert not comparison.gain.rejects(0.5)
