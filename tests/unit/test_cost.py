"""The cost model: bounded and monotone whatever it is told, and right about a machine it has watched."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.cost import LENGTHS, CostModel, padded_length


@given(st.integers(1, 100_000))
def test_padding_covers_and_wastes_little(n: int) -> None:
    padded = padded_length(n)
    assert padded >= n
    assert padded <= max(2 * n, LENGTHS[0])
    assert padded_length(padded) == padded
    if n > 1:
        assert padded_length(n - 1) <= padded


chunks = st.tuples(st.sampled_from(LENGTHS), st.integers(0, 100_000))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.lists(chunks, min_size=1, max_size=4), st.floats(0.0, 1e6)), max_size=60))
def test_predictions_stay_finite_and_monotone(observations: list[tuple[list[tuple[int, int]], float]]) -> None:
    """Whatever times are measured: longer and deeper never costs less, and never less than nothing."""
    model = CostModel()
    for observed, ms in observations:
        model.observe_chunks(observed, ms)
    for context in (0, 100, 10_000, 1_000_000):
        costs = [model.predict(n, context) for n in LENGTHS]
        assert all(0.0 <= c < float("inf") for c in costs)
        assert costs == sorted(costs)
    for n in LENGTHS:
        costs = [model.predict(n, context) for context in (0, 10, 1000, 100_000)]
        assert costs == sorted(costs)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 200_000), st.floats(0.0, 1e5), st.integers(1, 10_000))
def test_a_budget_is_kept_unless_it_is_less_than_the_shortest_chunk(context: int, ms: float, longest: int) -> None:
    model = CostModel()
    n = model.affordable(context, ms, longest)
    assert n in LENGTHS
    if n > LENGTHS[0]:
        assert n <= longest
        assert model.predict(n, context) <= ms
    longer = [k for k in LENGTHS if k > n and k <= longest]
    assert not longer or model.predict(longer[0], context) > ms


def _machine(length: int, context: int) -> float:
    return 2.0 + 0.1 * length + 1e-4 * length * (context + length / 2) + 0.002 * context


def _watch(model: CostModel, steps: int, rng: Random, factor: float = 1.0, noise: float = 0.0) -> None:
    for _ in range(steps):
        seen = [(rng.choice(LENGTHS[:13]), rng.randrange(8000)) for _ in range(rng.choice((1, 1, 2)))]
        ms = factor * sum(_machine(*c) for c in seen) - factor * 2.0 * (len(seen) - 1)
        model.observe_chunks(seen, ms * (1 + noise * (2 * rng.random() - 1)))


def _worst(model: CostModel, factor: float = 1.0) -> float:
    cases = [(n, k) for n in LENGTHS[2:13] for k in (0, 500, 2000, 8000)]
    return max(abs(model.predict(*c) / (factor * _machine(*c)) - 1) for c in cases)


def test_it_learns_a_machine() -> None:
    model = CostModel()
    _watch(model, 300, Random(0))
    assert _worst(model) < 0.25


def test_it_learns_a_noisy_machine_where_it_matters() -> None:
    """The large chunks, which stall others; small ones within a few milliseconds."""
    model = CostModel()
    _watch(model, 300, Random(1), noise=0.1)
    for n in (256, 512, 1024):
        for context in (0, 2000, 8000):
            assert model.predict(n, context) == pytest.approx(_machine(n, context), rel=0.15)
    for n in LENGTHS[:4]:
        assert model.predict(n, 0) == pytest.approx(_machine(n, 0), abs=15)


def test_it_follows_a_machine_that_slows_down() -> None:
    model = CostModel()
    _watch(model, 200, Random(2))
    _watch(model, 400, Random(3), factor=3.0)
    assert _worst(model, 3.0) < 0.3


def test_one_outlier_does_not_stop_the_prompts() -> None:
    """A step that took a second (another program ran) is forgotten."""
    model = CostModel()
    rng = Random(4)
    _watch(model, 200, rng)
    model.observe_chunks([(64, 0)], 1000.0)
    _watch(model, 200, rng)
    assert _worst(model) < 0.5


def test_a_thousand_identical_chunks_keep_it_sane() -> None:
    """Forgetting without news must not let the gain grow until a single measurement throws everything over."""
    model = CostModel()
    for _ in range(20_000):
        model.observe_chunks([(256, 0)], 30.0)
    assert model.predict(256, 0) == pytest.approx(30.0, rel=0.01)
    model.observe_chunks([(256, 0)], 33.0)
    assert model.predict(256, 0) == pytest.approx(30.0, rel=0.12)
    assert model.predict(512, 0) < 200.0


def test_decode_time_is_a_moving_average() -> None:
    model = CostModel()
    model.observe_decode(10.0)
    assert model.decode_ms == 10.0
    model.observe_decode(20.0)
    assert 10.0 < model.decode_ms < 20.0
    for _ in range(200):
        model.observe_decode(20.0)
    assert model.decode_ms == pytest.approx(20.0, rel=1e-3)
