"""Steps in flight together on Metal: whoever uses the pool or a slot is ordered behind whoever used it before, where
either writes, and nobody copies them."""

from __future__ import annotations

import random
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.engine.plan import RowKind, StepPlan
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.kernels.inplace import Writing
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.forward import Forward
from mlx_tandem.model.step.pauses import Pauses
from mlx_tandem.types import Request, SamplingParams
from tests import tiny_models, tiny_vision
from tests.engine.test_verify import Oracle, serve
from tests.hazards import plants, steps
from tests.hazards.plants import PLANTS
from tests.hazards.rule import Fault, faults
from tests.hazards.steps import ENGINES, KINDS, SERVED, Metal, Step

engines = pytest.mark.parametrize("metal", ENGINES, indirect=True)
short_blocks = pytest.mark.parametrize("metal", ["short blocks"], indirect=True)
own_blocks = pytest.mark.parametrize("metal", ["own blocks"], indirect=True)

WRITERS = {"store", "delta_net_inputs", "gated_delta_in_place"}
"""The kernels that write arrays in place, beside those for keys and values of fused blocks."""


def found(metal: Metal, *launched: Step) -> list[Fault]:
    return faults(metal.launch(*launched), metal.kept)


@short_blocks
@pytest.mark.parametrize("first", KINDS)
def test_every_step_is_safe_behind_every_other(metal: Metal, first: str) -> None:
    for second in KINDS:
        assert not found(metal, KINDS[first](metal), KINDS[second](metal)), f"{first}, then {second}"


@engines
def test_many_steps_are_safe_together(metal: Metal) -> None:
    """This one launch finds each bug of plants.py, on the engine on which it is planted."""
    kinds = list(KINDS) * 2
    random.Random(0).shuffle(kinds)
    assert not found(metal, *(KINDS[kind](metal) for kind in kinds))


@engines
def test_kernels_write_the_pool_in_each_of_them(metal: Metal) -> None:
    """What is checked is there: every step that has rows writes each layer's keys and values, by kernels alone."""
    for name, kind in KINDS.items():
        step = kind(metal)
        graph = metal.launch(step)
        written = [op for op in graph.ops if op.writes]
        if isinstance(step, StepPlan):
            assert {op.name for op in written} <= WRITERS | {op.name for op in written if "rotary" in op.name}, name
            pools = [label for label in metal.kept if "layer" in label and "model.layers" not in label]
            assert sum(len(op.writes) for op in written) >= len(pools), name


@short_blocks
def test_a_chunk_that_waits_on_the_way_is_safe(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work that is dispatched before a step is complete runs in order, too."""
    monkeypatch.setattr(metal.runner, "pauses", Pauses(16))
    launched = steps.decode(metal), steps.first_chunk(metal), steps.decode_others(metal)
    metal.launch(*launched)  # constants are computed when they are first met
    graph = metal.launch(*launched)
    # It waits for every layer but the last, each time when the next one has been dispatched.
    assert [e.waits for e in graph.evaluations].count(True) == metal.engine.built.info.layers - 1
    assert not faults(graph, metal.kept)


@pytest.mark.parametrize("metal", ["short blocks", "windows", "states"], indirect=True)
def test_what_the_scheduler_asks_for_is_safe(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps of a workload with forks, chunks, copies and preemption, as if none had been waited for."""
    plans: list[StepPlan] = []
    launch = MLXRunner.launch

    def kept(self: MLXRunner, plan: StepPlan) -> object:
        plans.append(plan)
        return launch(self, plan)

    rng = np.random.default_rng(3)
    with monkeypatch.context() as patch:
        patch.setattr(MLXRunner, "launch", kept)
        loop = metal.engine.loop(blocks=14, window_blocks=14, chunks=24)
        for i, n in enumerate((30, 5, 17, 41)):
            params = SamplingParams(max_tokens=14, temperature=0.0)
            loop.add(Request(i, tuple(rng.integers(3, tiny_models.VOCAB, n).tolist()), params, n=1 + i % 2))
            loop.step()
        loop.run()
    assert any(plan.copies for plan in plans) and len(plans) > 20
    metal.runner.reset()
    assert not found(metal, *plans)


WITHOUT = {
    "states": [
        ("StateView(after(order, line)", "StateView(line"),
        ("StateView(after(order, read[0]) if read", "StateView(read[0] if read"),
    ],
    "a head": [("zero_of([logits, *states, *ahead.marker])", "zero_of([logits, *states])")],
}
"""Dependencies of states and of a head, and the text without them: each is found in the steps of these engines."""


@pytest.mark.parametrize("metal", SERVED, indirect=True)
def test_what_the_scheduler_asks_of_other_models_is_safe(metal: Metal) -> None:
    """The same with states, which steps read and write, with drafts that steps verify, and with images."""
    vision = metal.engine.built.info.vision is not None
    params = SamplingParams(max_tokens=10, temperature=0.0)
    asked = []
    for i, n in enumerate((30, 5, 17)):
        text = tuple(np.random.default_rng(i).integers(10, 40, n).tolist())
        prompt, images = tiny_vision.prompt("qwen2_5_vl", [text[:4], i, text[4:]]) if vision else (text, ())
        asked.append(Request(i, prompt, params, n=1 + i % 2, images=images))
    plans: list[StepPlan] = []
    launch = MLXRunner.launch
    with pytest.MonkeyPatch.context() as patch:
        free = serve(metal.engine, asked)
        metal.runner.reset()
        patch.setattr(MLXRunner, "launch", lambda self, plan, *more: (plans.append(plan), launch(self, plan, *more))[1])
        loop = serve(metal.engine, asked, None if vision else Oracle(free, 3), chunks=12)
    assert vision or loop.accepted
    assert any(plan.encodes for plan in plans) == vision
    assert any(row.kind is RowKind.VERIFY for plan in plans for row in plan.rows) != vision
    metal.runner.reset()
    assert not found(metal, *plans)
    for right, wrong in WITHOUT.get(metal.name, ()):
        with pytest.MonkeyPatch.context() as patch:
            owner = "_views" if right.startswith("StateView") else "step"
            plants.text(Forward, owner, right, wrong)(metal, patch)
            assert found(metal, *plans), wrong


# --- planted bugs ----------------------------------------------------------------------------------------------------


def test_there_are_enough_plants() -> None:
    assert len(PLANTS) >= 20


@pytest.mark.parametrize(
    ("metal", "name"),
    sorted((plant.engine, name) for name, plant in PLANTS.items()),
    indirect=["metal"],
)
def test_every_dependency_that_is_taken_away_is_found(metal: Metal, name: str) -> None:
    """In this module, whose engines they share: building one takes longer than all of its steps."""
    plant = PLANTS[name]
    # Behind the steps comes one that nothing but the order makes follow them.
    launched = [step(metal) for step in (*plant.steps, steps.decode_others)]
    assert not faults(metal.launch(*launched), metal.kept)
    with pytest.MonkeyPatch.context() as patch:
        plant.take(metal, patch)
        assert faults(metal.launch(*launched), metal.kept)


# --- as it was ------------------------------------------------------------------------------------------------------


@pytest.fixture
def undone(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary kernels write the pool, MLX's own operations write whatever else there is, and nothing keeps an order."""
    monkeypatch.setattr(inplace, "writing", lambda: Writing(None))
    monkeypatch.setattr(metal.runner._order, "zeros", [])
    monkeypatch.setattr(metal.runner._lora, "_writer", None)


def which(found: list[Fault], kind: str, first: str, second: str = "") -> list[Fault]:
    return [f for f in found if f.kind == kind and f.first.startswith(first) and f.second.startswith(second)]


@short_blocks
@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("step", [steps.copy, steps.load, steps.fork], ids=lambda step: step.__name__)
def test_without_the_order_mlx_copied_the_pool_and_lost_what_kernels_wrote(
    metal: Metal, step: Callable[[Metal], StepPlan]
) -> None:
    pools = [label for label in metal.kept if "layer" in label and "model.layers" not in label]
    together = found(metal, steps.decode(metal), step(metal))
    copied = which(together, "copy", "Scatter")
    assert {f.array for f in copied} == set(pools)
    lost = which(together, "read after write", "rotary", "the copy by Scatter")
    assert {f.array for f in lost} == set(pools)


@short_blocks
@pytest.mark.usefixtures("undone")
def test_without_the_order_a_chunk_read_lines_that_were_being_written(metal: Metal) -> None:
    together = found(metal, steps.first_chunk(metal), steps.next_chunk(metal))
    assert which(together, "read after write", "rotary_joined_fetched in evaluation 0", "Gather in evaluation 1")


@short_blocks
def test_rotary_kernels_alone_are_not_safe_in_flight(metal: Metal, monkeypatch: pytest.MonkeyPatch) -> None:
    """One way of writing is not enough where it has no order."""
    monkeypatch.setattr(metal.runner._order, "zeros", [])
    assert found(metal, steps.decode(metal), steps.decode_others(metal))


# --- where the writing kernel is not to be had ------------------------------------------------------------------------


@own_blocks
@pytest.mark.usefixtures("undone")
@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("learning's publish",)])
def test_mlx_s_own_writes_are_in_place_one_at_a_time(metal: Metal, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(metal.runner, "one_at_a_time", True)

    def finished(step: StepPlan) -> Callable[[Metal], None]:
        def launch(metal: Metal) -> None:
            runner = metal.runner
            runner.launch(step)
            while runner.queue._running is not None:
                mx.synchronize()
                runner.queue.done(runner.queue._running)

        return launch

    kinds = [KINDS[k](metal) for k in ("decode", kind, "chunks")]
    assert not found(metal, *(finished(step) for step in kinds if isinstance(step, StepPlan)))


@own_blocks
@pytest.mark.usefixtures("undone")
def test_mlx_s_own_writes_copy_the_pool_in_flight(metal: Metal) -> None:
    together = found(metal, steps.decode(metal), steps.decode(metal))
    assert {f.kind for f in together} == {"copy"}
