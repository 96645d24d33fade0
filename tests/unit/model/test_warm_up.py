from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.plan import StepPlan
from mlx_tandem.model import warm_up
from mlx_tandem.model.choices import Pace
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.warm_up import (
    AGREEMENT,
    CHUNK_SECONDS,
    CHUNKS,
    ENOUGH_CHUNKS,
    LONG,
    MOST_SECONDS,
    RUNS,
    _shortest,
)
from tests import tiny_models
from tests.engine.mlx_engine import make_engine


@given(st.lists(st.floats(1e-3, 1e3), min_size=RUNS, max_size=RUNS))
def test_a_step_runs_until_two_of_its_times_agree_or_one_is_long(times: list[float]) -> None:
    """The first, which pays for tracing, says nothing."""
    taken: list[float] = []

    def run() -> Iterator[float]:
        for taking in times:
            taken.append(taking)
            yield taking

    found = _shortest(run())
    assert found == min(taken[1:])
    if times[1] >= LONG:
        assert len(taken) == 2
        return
    agrees = [sorted(times[1:n])[1] <= AGREEMENT * min(times[1:n]) for n in range(3, RUNS + 1)]
    assert len(taken) == (3 + agrees.index(True) if any(agrees) else RUNS)


def timed(took: Callable[[int, int], float]) -> list[tuple[int, int, float]]:
    """What is measured where a chunk takes so many milliseconds by its length and context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_up, "_chunks", lambda info: list(CHUNKS))
        patch.setattr(warm_up, "_chunk", lambda info, length, context: (length, context))
        patch.setattr(warm_up, "_milliseconds", lambda runner, plan: took(*plan))
        nothing: Any = None
        return warm_up._time_chunks(nothing, nothing, lambda stage, fraction: None, lambda: False)


@given(st.lists(st.floats(1e-3, 40), min_size=len(CHUNKS), max_size=len(CHUNKS)))
def test_chunks_are_timed_until_enough_of_them_have_taken_long_enough(times: list[float]) -> None:
    by_chunk = dict(zip(CHUNKS, times, strict=True))
    measured = timed(lambda *chunk: by_chunk[chunk])
    assert [chunk[:2] for chunk in measured] == list(CHUNKS[: len(measured)])
    spent = [2e-3 * sum(times[:n]) for n in range(len(times) + 1)]
    assert all(spent[n] < CHUNK_SECONDS for n in range(ENOUGH_CHUNKS, len(measured)))
    assert len(measured) == len(CHUNKS) or (len(measured) >= ENOUGH_CHUNKS and spent[len(measured)] >= CHUNK_SECONDS)


@given(st.floats(0.01, 5e3), st.floats(0.0, 5.0))
def test_chunks_take_a_bounded_time_on_a_slow_device(each: float, fixed: float) -> None:
    """Whose chunks take so many milliseconds for each token; and their cost is known all the same."""
    ran: list[tuple[int, int]] = []

    def took(length: int, context: int) -> float:
        ran.append((length, context))
        return fixed + each * length

    measured = timed(took)
    first = 2 * took(*CHUNKS[0])
    others = sum(took(*chunk) for chunk in ran[2:-1] if chunk != CHUNKS[0])
    assert others <= max(1e3 * MOST_SECONDS, first) * RUNS / 2
    assert len({length for length, _, _ in measured}) > 1
    for length, _, milliseconds in measured:
        assert fixed + each * length <= milliseconds * 1.001 <= 1.002 * (fixed + each * length) * max(length / 8, 1)
    cost = CostModel()
    cost.fit(measured)
    assert cost.predict(64, 0) >= 0.5 * (fixed + each * 64)


def test_steps_that_are_slow_are_not_run_only_to_compile_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither larger ones nor those that verify drafts, and steps do not overlap."""
    built = make_engine(tiny_models.make(tmp_path / "model", "llama")).built
    run: list[StepPlan] = []

    def milliseconds(runner: MLXRunner, plan: StepPlan) -> float:
        run.append(plan)
        runner.wait(runner.launch(plan))
        return 1e3 * sum(len(row.tokens) for row in plan.rows)

    monkeypatch.setattr(warm_up, "_milliseconds", milliseconds)
    monkeypatch.setattr(warm_up, "decide_overlap", lambda *args: pytest.fail("it would take seconds"))
    monkeypatch.setattr(warm_up, "_verify_some", lambda *args, **options: pytest.fail("it would take seconds"))
    cost = CostModel()
    pace = warm_up.warm_up(built.runner, built.info, cost, lambda stage, fraction: None, 0, method="ngram")
    assert [sum(len(row.tokens) for row in plan.rows) for plan in run] == [8, 8, 1, 1]
    assert pace.chunks[0] == (8, 0, 8e3) and pace.decodes == ((1, 1e3), (4, 4e3)) and pace.one_at_a_time
    assert not pace.whole, "another start may find another machine"
    assert cost.decode(4) == pytest.approx(4e3) and built.runner.one_at_a_time


def test_what_a_cpu_has_no_time_to_compile_is_compiled_when_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make_engine(tiny_models.make(tmp_path / "model", "llama")).built
    run: list[StepPlan] = []
    launch = MLXRunner.launch

    def launched(runner: MLXRunner, plan: StepPlan, *args: Any) -> Any:
        run.append(plan)
        return launch(runner, plan, *args)

    monkeypatch.setattr(MLXRunner, "launch", launched)
    monkeypatch.setattr(warm_up, "decide_overlap", lambda *args: None)
    late = SimpleNamespace(monotonic=itertools.count(0, 2 * MOST_SECONDS).__next__, perf_counter=time.perf_counter)
    monkeypatch.setattr(warm_up, "time", late)
    pace = warm_up.warm_up(built.runner, built.info, CostModel(), lambda stage, fraction: None, 0)
    assert {tuple(len(row.tokens) for row in plan.rows) for plan in run} == {(8,), (1,)} and pace.whole
    assert any(seating.params.temperature for plan in run for seating in plan.seatings)
    monkeypatch.setattr(warm_up, "time", time)
    run.clear()
    again = warm_up.warm_up(built.runner, built.info, CostModel(), lambda stage, fraction: None, 0, pace)
    assert again == pace, "a later start does not pay for what the first left out"
    assert any(seating.params.temperature for plan in run for seating in plan.seatings)


@pytest.mark.parametrize("one_at_a_time", [True, False])
def test_steps_overlap_where_those_of_the_other_process_do(tmp_path: Path, one_at_a_time: bool) -> None:
    """Nothing is timed here, so this process cannot find out whether steps disturb each other."""
    built = make_engine(tiny_models.make(tmp_path / "model", "llama")).built
    pace = Pace(((8, 0, 1.0), (64, 0, 2.0)), ((1, 1.0), (4, 1.5)), one_at_a_time)
    built.runner.one_at_a_time = not one_at_a_time
    made = warm_up.warm_up(built.runner, built.info, CostModel(), lambda stage, fraction: None, 0, pace)
    assert made == pace and built.runner.one_at_a_time == one_at_a_time
