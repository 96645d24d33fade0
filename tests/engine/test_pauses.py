"""Forwards that wait for the device on the way: what the plan has before its rows is with the device by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.model.step.pauses import Pauses
from mlx_tandem.types import SamplingParams
from tests import tiny_models
from tests.engine.mlx_engine import make_engine

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@pytest.mark.parametrize("before", [{"copies": ((1, 9),)}, {"saves": (2,)}])
def test_the_device_knows_of_what_comes_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any]
) -> None:
    """Where kernels write the pool, nothing else orders a chunk behind the blocks that are copied and read."""
    engine = make_engine(tiny_models.make(tmp_path / "model", "llama"))
    runner, size = engine.built.runner, engine.built.info.block_size
    runner.rectangles.common_offsets, runner.pauses = True, Pauses(16)
    runner.one_at_a_time = False
    table = [1, 2, 3, 4, 5, 6, 7, 8]
    first = StepPlan(
        (Row(RowKind.PROMPT, 0, 0, 0, 0, (5,) * size, [table], True),), seatings=(Seating(0, GREEDY, 0, 1, (0,)),)
    )
    runner.wait(runner.launch(first))
    calls: list[str] = []
    wait, dispatch = mx.eval, mx.async_eval
    monkeypatch.setattr(mx, "eval", lambda *a: (calls.append("wait"), wait(*a))[1])
    monkeypatch.setattr(mx, "async_eval", lambda *a: (calls.append("dispatch"), dispatch(*a))[1])
    plan = StepPlan((Row(RowKind.PROMPT, 0, 0, 0, size, (7,) * 32, [table], True),), **before)
    assert runner.launch_waits(plan)
    flight = runner.launch(plan)
    assert calls[0] == "dispatch"
    assert "wait" in calls
    runner.wait(flight)
    runner.one_at_a_time = True  # each part then waits in the host's queue until the part before it is done
    calls.clear()
    flight = runner.launch(plan)
    assert calls[:3] == ["dispatch", "wait", "dispatch"], "the part before is done when the forward uses the pool"
    runner.wait(flight)


def test_the_device_computes_while_the_host_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the host waits for a group of layers, it has already dispatched the next group, and no later one."""
    engine = make_engine(tiny_models.make(tmp_path / "model", "llama", num_hidden_layers=5))
    runner = engine.built.runner
    runner.rectangles.common_offsets, runner.pauses = True, Pauses(16)
    runner.one_at_a_time = False
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (7,) * 32, [[1, 2, 3, 4, 5]], True)
    plan = StepPlan((row,), seatings=(Seating(0, GREEDY, 0, 1, (0,)),))
    given: list[Any] = []
    waited: list[int] = []
    wait, dispatch = mx.eval, mx.async_eval

    def waits(x: Any) -> None:
        waited.append(next(i for i, own in enumerate(given) if own is x))
        assert len(given) - waited[-1] == 2
        wait(x)

    monkeypatch.setattr(mx, "eval", waits)
    monkeypatch.setattr(mx, "async_eval", lambda x: (given.append(x), dispatch(x))[1])
    flight = runner.launch(plan)
    monkeypatch.undo()
    assert waited == [0, 1, 2, 3]
    runner.wait(flight)


def test_tokens_beside_rows_that_decode_are_no_chunk_to_wait_for(tmp_path: Path) -> None:
    """Their forward is short, so the step before it need not be over when it is launched."""
    runner = make_engine(tiny_models.make(tmp_path / "model", "llama")).built.runner
    runner.pauses, runner.one_at_a_time = Pauses(1024), False
    decode = Row(RowKind.DECODE, 0, 0, 0, 1, (7,), [[1]], True)
    prompt = Row(RowKind.PROMPT, 1, 1, 0, 0, (7,) * 256, [list(range(2, 34))], True)
    assert runner.launch_waits(StepPlan((decode, prompt)))
    assert not runner.launch_waits(StepPlan((decode, replace(prompt, piggybacked=True))))
