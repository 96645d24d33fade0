"""The cost model: bounded and monotone whatever it is told, and right about a machine it has watched."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.engine.cost import LENGTHS, CostModel, padded_length
from mlx_tandem.engine.plan import Row, RowKind, StepPlan
from mlx_tandem.model.warm_up import CHUNKS, ENOUGH_CHUNKS


@given(st.integers(1, 100_000))
def test_padding_covers_and_wastes_little(n: int) -> None:
    padded = padded_length(n)
    assert padded >= n
    assert padded <= max(2 * n, LENGTHS[0])
    assert padded_length(padded) == padded
    if n > 1:
        assert padded_length(n - 1) <= padded


chunks = st.tuples(st.sampled_from(LENGTHS), st.integers(0, 100_000))


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.lists(chunks, min_size=1, max_size=4), st.floats(0.0, 1e6)), max_size=60))
def test_predictions_stay_finite_and_monotone(observations: list[tuple[list[tuple[int, int]], float]]) -> None:
    """Whatever times are measured: longer and deeper never costs less, and never less than nothing."""
    model = CostModel()
    for observed, ms in observations:
        model.observe(observed, 0, ms)
    for context in (0, 100, 10_000, 1_000_000):
        costs = [model.predict(n, context) for n in LENGTHS]
        assert all(0.0 <= c < float("inf") for c in costs)
        assert costs == sorted(costs)
    for n in LENGTHS:
        costs = [model.predict(n, context) for context in (0, 10, 1000, 100_000)]
        assert costs == sorted(costs)


@settings(max_examples=100, derandomize=True)
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


STARTUP = list(CHUNKS)


def _fitted(rng: Random | None = None, noise: float = 0.0) -> CostModel:
    model = CostModel()
    model.fit([(n, k, _machine(n, k) * (1 + (noise * (2 * rng.random() - 1) if rng else 0.0))) for n, k in STARTUP])
    return model


def _watch(model: CostModel, steps: int, rng: Random, factor: float = 1.0) -> None:
    for _ in range(steps):
        seen = [(rng.choice(LENGTHS[:13]), rng.randrange(8000)) for _ in range(rng.choice((1, 1, 2)))]
        model.observe(seen, 0, factor * sum(_machine(*c) for c in seen))


def _worst(model: CostModel, factor: float = 1.0) -> float:
    cases = [(n, k) for n in LENGTHS[2:13] for k in (0, 500, 2000, 8000)]
    return max(abs(model.predict(*c) / (factor * _machine(*c)) - 1) for c in cases)


def test_it_learns_a_machine_from_the_first_chunks() -> None:
    assert _worst(_fitted()) < 0.01


def test_the_first_chunks_of_a_slow_machine_are_enough() -> None:
    model = CostModel()
    model.fit([(n, k, _machine(n, k)) for n, k in CHUNKS[:ENOUGH_CHUNKS]])
    assert _worst(model) < 0.01


def test_it_learns_a_noisy_machine() -> None:
    assert max(_worst(_fitted(Random(seed), noise=0.05)) for seed in range(20)) < 0.5


@given(st.lists(st.tuples(*[st.sampled_from(LENGTHS), st.integers(0, 8192), st.floats(0.0, 1e5)]), min_size=1))
def test_any_measurements_give_a_sane_form(measured: list[tuple[int, int, float]]) -> None:
    model = CostModel()
    model.fit(measured)
    costs = [model.predict(n, 1000) for n in LENGTHS]
    assert costs == sorted(costs)
    assert all(0.0 <= c < float("inf") for c in costs)


def test_it_follows_a_machine_that_slows_down_and_recovers() -> None:
    model = _fitted()
    _watch(model, 100, Random(2), factor=3.0)
    assert _worst(model, 3.0) < 0.1
    _watch(model, 100, Random(3))
    assert _worst(model) < 0.1


def test_one_outlier_hardly_moves_it() -> None:
    """A step that took a second (another program ran) must not stop the prompts."""
    model = _fitted()
    model.observe([(64, 0)], 0, 1000.0)
    assert _worst(model) < 0.1


def test_it_learns_what_decoding_costs_and_follows_it() -> None:
    model = _fitted()
    model.fit([(n, k, _machine(n, k)) for n, k in STARTUP], [(rows, 3.0 + 0.5 * rows) for rows in (1, 4, 16)])
    assert model.decode(32) == pytest.approx(19.0, rel=1e-3)
    for _ in range(200):
        model.observe([], 32, 38.0)
    assert model.decode(32) == pytest.approx(38.0, rel=0.01)
    assert _worst(model) < 0.01, "a step without chunks says nothing of chunks"


def test_steps_with_both_teach_both() -> None:
    """Streams may decode beside prompts for hours: what decoding costs must not wait for a step of its own."""
    model = _fitted()
    model.fit([(n, k, _machine(n, k)) for n, k in STARTUP], [(rows, 3.0 + 0.5 * rows) for rows in (1, 4, 16)])
    for _ in range(200):
        model.observe([(64, 100)], 16, 2.0 * (_machine(64, 100) + 11.0))
    assert model.decode(16) == pytest.approx(22.0, rel=0.01)
    assert _worst(model, 2.0) < 0.01


CHUNK = Row(RowKind.PROMPT, 1, 0, 0, 100, tuple(range(64)), ((1,),), sample=False)
TAIL = Row(RowKind.PROMPT, 2, 1, 0, 100, (1, 2, 3), ((2,),), sample=True, piggybacked=True)
NEXT = Row(RowKind.DECODE, 3, 2, 0, 7, (1,), ((3,),), sample=True)
PLAIN = StepPlan(rows=(CHUNK, NEXT))
ODD = {
    "empty": StepPlan(rows=()),
    "saves": replace(PLAIN, saves=(1,)),
    "loads": replace(PLAIN, loads=((1, b""),)),
    "masked": replace(PLAIN, masked=(1,)),
    "drafts": replace(PLAIN, rows=(CHUNK, structs.replace(NEXT, kind=RowKind.VERIFY, tokens=(1, 2)))),
}
"""Steps that take long for other reasons than the model's."""


def test_a_step_is_expected_to_take_what_its_rows_take() -> None:
    """A piggybacked prompt costs what as many rows that decode do."""
    model = _fitted()
    assert model.expected(PLAIN) == model.step([(64, 100)], 1)
    assert model.expected(replace(PLAIN, rows=(CHUNK, TAIL, NEXT))) == model.step([(64, 100)], 4)
    model.observe_step(PLAIN, 1e3)
    assert model.expected(PLAIN) > 1.01 * _fitted().expected(PLAIN)


@pytest.mark.parametrize("plan", [*ODD.values(), replace(PLAIN, rows=(CHUNK, TAIL, NEXT))], ids=[*ODD, "piggybacked"])
def test_steps_of_kinds_that_are_not_modelled_teach_nothing(plan: StepPlan) -> None:
    model = _fitted()
    known = model.step([(64, 100)], 4)
    model.observe_step(plan, 1e3)
    assert model.step([(64, 100)], 4) == known
    if plan in ODD.values():
        assert model.expected(plan) == float("inf")
