"""Learning in the engine's loop: whose turn it is, one message after the other, and what is published and saved."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine import pipeline
from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.engine.plan import Slice, StepPlan, StepResult
from mlx_tandem.engine.time_share import TimeShare
from mlx_tandem.engine.trainers import TrainerHost
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.model.step.prebuilt import Company
from mlx_tandem.training.device.beside import BesideSteps
from mlx_tandem.types import AdapterSource
from tests.engine.front import Front, adapter, request
from tests.engine.reference import ReferenceRunner
from tests.engine.slices import Slices, a_pass, background, failures, open_trainer, owe
from tests.engine.workloads import expected

MakeFront = Callable[..., Front]


@pytest.fixture
def front(learning_front: Front) -> Front:
    return learning_front


# --- one after the other -----------------------------------------------------------------------------------------


def test_messages_are_done_in_order_and_each_is_answered(front: Front, trainers: Slices) -> None:
    front.send(
        a_pass(2),
        m.OptimStep(3, "p", AdamParams(0.1)),
        m.SettleTrainer(4, "p", True),
        m.PublishTrainer(5, "p"),
        m.SaveTrainer(6, "p", "/folder"),
        m.CloseTrainer(7, "p"),
    )
    front.finish()
    assert trainers.done == ["slice 0", "slice 1", "slice 2", "step p", "settle p True", "write p1 /folder"]
    kinds = (m.PassDone, m.Stepped, m.AdapterLoaded)
    assert [front.got(kind)[-1].call for kind in kinds] == [2, 3, 5]  # type: ignore[attr-defined]
    assert sorted(x.call for x in front.got(m.CallDone)) == [4, 6, 7]
    assert len(front.got(m.PassDone)[0].results) == 3
    assert front.core.stats().training_jobs == 0


def test_a_message_that_is_refused_fails_alone(front: Front, trainers: Slices) -> None:
    trainers.fail["step p"] = InvalidRequest("no", param="learning_rate")
    front.send(m.OptimStep(2, "p", AdamParams(0.1)), m.CloseTrainer(3, "q"), a_pass(4))
    front.finish()
    assert sorted(failures(front)) == [(2, "invalid_value"), (3, "trainer_not_found")]
    assert [x.param for x in front.got(m.CallFailed) if x.call == 2] == ["learning_rate"]
    assert [x.call for x in front.got(m.PassDone)] == [4]
    assert "drop p" not in trainers.done


def test_an_engine_without_trainers_says_so(make_front: MakeFront) -> None:
    front = make_front()
    front.send(open_trainer(1))
    front.finish()
    assert failures(front) == [(1, "invalid_value")]


def test_a_trainer_begins_with_an_adapter_that_is_loaded(front: Front, trainers: Slices) -> None:
    front.load("a")
    front.send(open_trainer(2, digest="a"), open_trainer(3, digest="b"), open_trainer(4, folder="/checkpoint"))
    front.finish()
    assert trainers.done == ["open p a", "open p /checkpoint"]
    assert failures(front) == [(3, "invalid_value")]


# --- beside what is served ---------------------------------------------------------------------------------------


def test_rows_made_for_training_have_their_turn_beside_a_pass(
    front: Front, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learning is due every third turn: a slice, then the rows."""
    turns = itertools.cycle([True, False, False])
    monkeypatch.setattr(front.duty, "may_train", lambda serving, training: next(turns))
    monkeypatch.setattr(TimeShare, "may_go_on", False)
    front.send(m.Submit(request(0, max_tokens=40)), m.Submit(background(request(1, max_tokens=40))))
    front.send(a_pass(2, slices=40))
    front.turn(30)
    assert len(front.tokens(1)) >= 3 and trainers.launched >= 3
    front.finish()


@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_a_slice_is_launched_behind_the_step_in_flight(
    front: Front, trainers: Slices, one_at_a_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next step behind the slice: the device is never without work. Where it would not take that step before
    the one in flight is read, that is first. Requests come out as alone."""
    front.reference.one_at_a_time = one_at_a_time
    front.send(*(m.Submit(request(i, max_tokens=12)) for i in range(3)))
    front.turn(2)
    front.send(a_pass(2, slices=6))
    turns = itertools.cycle([True, False])
    trainers.calls = front.runner.calls = []
    first = front.reference.launches
    with monkeypatch.context() as patch:
        patch.setattr(front.duty, "may_train", lambda serving, training: next(turns))
        patch.setattr(TimeShare, "may_go_on", False)
        front.turn(3)
    beside = [[f"launch {n}", f"wait {n - 1}"] for n in (first, first + 2)]
    if one_at_a_time:
        beside = [[wait, launch] for launch, wait in beside]
    assert front.runner.calls == [
        *("slice 0", *beside[0]),
        *("read slice 0", f"launch {first + 1}", f"wait {first}"),
        *("slice 1", *beside[1]),
    ]
    front.finish()
    assert trainers.launched == trainers.waited == 6
    assert all(front.tokens(i) == expected(request(i, max_tokens=12), 0) for i in range(3))
    front.assert_nothing_is_held()


def test_nothing_else_is_waited_for_while_a_step_waits_for_its_plan(
    front: Front, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device would not go on before the plan is there, nor the host before the device."""
    company = Company()
    front.trainers._backend = BesideSteps(trainers, company)
    awaited: list[bool] = []
    waits: list[bool] = []
    waited: list[bool] = []
    read, launch, wait_for_step = Slices._wait, ReferenceRunner.launch, ReferenceRunner.wait

    def wait(self: Slices, slice_: int) -> None:
        watch()
        awaited.append(front.core._pipeline._flight is None)
        read(self, slice_)

    def watch() -> None:
        waits.append(company.waits)

    def used(self: ReferenceRunner, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        company.end_to_wait()
        return launch(self, plan, on_built)

    def built(self: ReferenceRunner, handle: Any) -> StepResult:
        result = wait_for_step(self, handle)
        waited.append(self.awaits_plan and company.begin_to_wait(lambda: None))
        return result

    turns = itertools.cycle([True, False])
    monkeypatch.setattr(Slices, "_wait", wait)
    monkeypatch.setattr(trainers, "watch", watch)
    monkeypatch.setattr(ReferenceRunner, "launch", used)
    monkeypatch.setattr(ReferenceRunner, "wait", built)
    monkeypatch.setattr(type(front.reference), "launch_waits", lambda self, plan: True)
    front.send(*(m.Submit(request(i, max_tokens=12)) for i in range(3)))
    front.turn(2)
    front.send(a_pass(2, slices=6))
    with monkeypatch.context() as patch:
        patch.setattr(front.duty, "may_train", lambda serving, training: next(turns))
        patch.setattr(TimeShare, "may_go_on", False)
        front.turn(4)
    assert front.core._pipeline._flight is not None and any(awaited)
    assert any(waited) and waits and not any(waits)
    front.core._pipeline.drain()
    assert waited[-1] and not company.waits


def test_a_plan_names_the_slice_that_goes_before_its_step(
    front: Front, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its trainers, what it is of, and its number."""
    plans: list[StepPlan] = []
    plain = front.runner.launch
    monkeypatch.setattr(front.runner, "launch", lambda plan: (plans.append(plan), plain(plan))[1])
    monkeypatch.setattr(front.duty, "may_train", lambda serving, training: training)
    monkeypatch.setattr(TimeShare, "may_go_on", False)
    front.send(m.Submit(request(0, max_tokens=12)))
    front.turn(2)
    front.send(a_pass(2), m.OptimStep(3, "p", AdamParams(0.1)), m.SettleTrainer(4, "p", True))
    front.turn(8)
    named = [("forward_backward", 0), ("forward_backward", 1), ("forward_backward", 2), ("forward_backward", 3)]
    named += [("optim_step", 0), ("settle", 0)]
    assert [plan.slice for plan in plans if plan.slice is not None] == [Slice(("p",), *each) for each in named]
    front.finish()
    assert front.tokens(0) == expected(request(0, max_tokens=12), 0)


def test_a_step_of_many_prompt_tokens_and_a_slice_are_not_under_way_at_once(
    front: Front, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are. Learning is alone at first. Requests come out as alone."""
    monkeypatch.setattr(pipeline, "APART_TOKENS", 10)
    prompts = [(1 + i,) * n for i, n in enumerate((15, 4, 21, 12, 9))]
    requests = [structs.replace(request(i, max_tokens=6), prompt=prompt) for i, prompt in enumerate(prompts)]
    trainers.calls = front.runner.calls = calls = []
    large: set[int] = set()

    def launch(plan: Any, real: Any = front.runner.launch) -> Any:
        if plan.prompt_tokens >= 10:
            large.add(front.reference.launches)
        return real(plan)

    monkeypatch.setattr(front.runner, "launch", launch)
    front.send(a_pass(2, slices=40))
    front.turn(3)
    for one in requests:
        front.send(m.Submit(one))
        front.turn(2)
        owe(front)
        front.turn(2)
    monkeypatch.setattr(TimeShare, "may_go_on", False)
    owe(front)
    front.finish()
    slices, steps, together = set[str](), set[int](), 0
    for call in calls:
        if call.startswith("slice"):
            slices.add(call)
        elif call.startswith("read slice"):
            slices.remove(call.removeprefix("read "))
        elif call.startswith("launch"):
            steps.add(int(call.split()[1]))
        else:
            steps.remove(int(call.split()[1]))
        together += bool(slices and steps)
        assert not (slices and steps & large), calls
    assert len(large) >= 2 and together and trainers.waited == 40
    assert all(front.tokens(i) == expected(one, 0) for i, one in enumerate(requests))
    front.assert_nothing_is_held()


def test_learning_that_is_due_more_than_a_slice_has_several_between_two_steps(
    make_front: MakeFront, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this clock all takes the same time: some six slices to a step, once learning is owed more than its bound."""
    front = make_front(trainers=trainers, duty=DutyConfig(inference=0.1, training=0.9))
    now = itertools.count()
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: next(now) / 20)
    monkeypatch.setattr(front.scheduler.prefill.cost, "expected", lambda plan: math.inf)
    front.send(open_trainer(1), m.Submit(request(0, max_tokens=40)), a_pass(2, slices=1000))
    front.turn(2)
    trainers.calls = front.runner.calls = []
    front.finish()
    calls = front.runner.calls[: len(front.runner.calls) - front.runner.calls[::-1].index("launch 39")]
    slices = sum(call.startswith("slice") for call in calls)
    steps = sum(call.startswith("launch") for call in calls)
    assert steps >= 36 and 5 * steps <= slices < 1000, (steps, slices)
    assert front.tokens(0) == expected(request(0, max_tokens=40), 0)


def test_a_step_that_is_read_late_does_not_pay_for_the_slice_behind_it(
    front: Front, trainers: Slices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host took longer to launch the next step than this one ran."""
    now = [time.perf_counter()]
    monkeypatch.setattr(pipeline.time, "perf_counter", lambda: now[0])
    took = {"wait": 0.01, "launch": 0.0}
    plain = front.runner.wait, front.runner.launch

    def passing(what: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(given: Any) -> Any:
            now[0] += took[what]
            return call(given)

        return timed

    for what, call in zip(("wait", "launch"), plain, strict=True):
        monkeypatch.setattr(front.runner, what, passing(what, call))
    monkeypatch.setattr(front.scheduler.prefill.cost, "expected", lambda plan: 10.0)
    front.send(m.Submit(request(0, max_tokens=40)))
    front.turn(4)
    took["wait"], took["launch"] = 0.0, 0.016
    given, had = front.duty.serving_ms, front.duty.training_ms
    front.send(a_pass(2, slices=1))
    front.turn(1)
    assert trainers.launched == 1 and not trainers.waited
    assert front.duty.serving_ms - given == pytest.approx(10.0, abs=1e-3)
    front.turn(1)
    assert trainers.waited and front.duty.training_ms - had == pytest.approx(6.0, abs=1e-3)


def test_slices_overlap_with_one_another(front: Front, trainers: Slices) -> None:
    looked: list[int] = []
    trainers.watch = lambda: looked.append(trainers.launched - trainers.waited)
    front.send(a_pass(2, slices=4))
    front.finish()
    assert looked == [0, 1, 1, 1]


def test_nothing_else_to_do_and_slices_run_back_to_back(front: Front, trainers: Slices) -> None:
    """And the inbox is looked at between them."""
    front.send(a_pass(2, slices=5))
    front.turn(2)
    front.send(m.Submit(request(0)))
    front.turn()
    assert trainers.done == ["slice 0", "slice 1"]
    assert front.scheduler.requests
    front.finish()
    assert front.tokens(0) == expected(request(0), 0)
    assert len(trainers.done) == 5


@pytest.mark.parametrize(("mode", "first"), [("training_only", "learning"), ("inference_only", "serving")])
def test_a_mode_says_who_goes_first(make_front: MakeFront, trainers: Slices, mode: str, first: str) -> None:
    front = make_front(trainers=trainers, duty=DutyConfig(mode=mode))  # type: ignore[arg-type]
    front.send(open_trainer(1), m.Submit(request(0)), a_pass(2), m.PublishTrainer(3, "p"))
    front.finish()
    front.send(m.Submit(request(1, "p0")))
    front.finish()
    assert front.tokens(1) == expected(request(1, "p0"), 0)
    assert [x.call for x in front.got(m.AdapterLoaded)] == [3]
    if first == "learning":
        done = next(i for i, x in enumerate(front.received) if isinstance(x, m.PassDone))
        assert done < next(i for i, x in enumerate(front.received) if isinstance(x, m.Output))
    else:
        assert failures(front) == [(2, "conflict")]
        assert trainers.done == ["open p "]


def test_learning_waits_while_requests_have_not_had_their_share(front: Front, trainers: Slices) -> None:
    front.duty.may_train(True, True)
    front.duty.note_training(1e6)
    front.send(m.Submit(request(0, max_tokens=20)), a_pass(2))
    while 0 not in front.finished():
        assert not trainers.done
        front.turn()
    front.finish()
    assert len(trainers.done) == 3


def test_learning_waits_while_streams_are_slow(make_front: MakeFront, trainers: Slices) -> None:
    """Slower than a nanosecond. Rows made for training are no streams that anybody waits for."""
    front = make_front(trainers=trainers, duty=DutyConfig(inter_token_p95_ms=1e-6))
    front.send(open_trainer(1), m.Submit(background(request(0, max_tokens=8))), m.Submit(request(1, max_tokens=1)))
    front.finish()
    assert not front.duty.is_slow
    trainers.done.clear()
    front.send(m.Submit(request(2, max_tokens=20)))
    front.turn(5)
    front.send(a_pass(2))
    while 2 not in front.finished():
        owe(front)
        assert not trainers.done
        front.turn()
    front.finish()
    assert len(trainers.done) == 3


def test_what_is_short_does_not_wait_for_its_turn(front: Front) -> None:
    front.duty.may_train(True, True)
    front.duty.note_training(1e6)
    front.send(m.Submit(request(0, max_tokens=40)))
    front.turn(2)
    front.send(m.PublishTrainer(2, "p"))
    front.turn(2)
    assert [x.call for x in front.got(m.AdapterLoaded)] == [2]
    front.finish()
    assert front.tokens(0) == expected(request(0, max_tokens=40), 0)


def test_time_is_counted_for_whom_it_was_spent(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    charged: list[tuple[Slice, float]] = []
    charge = TrainerHost.charge
    monkeypatch.setattr(
        TrainerHost, "charge", lambda self, slice_, ms: (charged.append((slice_, ms)), charge(self, slice_, ms))
    )
    both = background(request(0, length=3)), request(1, length=1)
    for r in both:
        front.send(m.Submit(r))
        before = front.core.stats()
        front.finish()
        after = front.core.stats()
        assert (after.training_ms > before.training_ms) is r.background
        assert (after.serving_ms > before.serving_ms) is not r.background
    before = front.core.stats()
    front.send(a_pass(2))
    front.finish()
    after = front.core.stats()
    assert after.training_ms > before.training_ms
    assert after.serving_ms == before.serving_ms
    assert {slice_ for slice_, _ in charged} == {Slice(("p",), "forward_backward", i) for i in range(4)}
    assert sum(ms for _, ms in charged) == pytest.approx(after.training_ms - before.training_ms)


def test_a_step_s_time_is_split_by_tokens(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: dict[str, list[float]] = {"note_serving": [], "note_training": []}
    for name, into in noted.items():
        monkeypatch.setattr(front.duty, name, into.append)
    monkeypatch.setattr(front.duty, "may_train", lambda serving, training: True)
    front.send(m.Submit(background(request(0, length=3, max_tokens=1))), m.Submit(request(1, length=5, max_tokens=1)))
    front.finish()
    ((serving,), (training,)) = noted.values()
    assert training / (serving + training) == pytest.approx(3 / 8)


def test_rows_made_for_training_wait_for_their_share_and_give_way(front: Front) -> None:
    """Four seats of them; a user's request has one at once, and they go on when it is over."""
    made = [background(request(i, max_tokens=12)) for i in range(4)]
    front.send(*map(m.Submit, made))
    front.turn(3)
    front.duty.may_train(True, True)
    front.duty.note_training(1e6)
    before = len(front.deltas)
    user = request(9, max_tokens=10)
    front.send(m.Submit(user))
    while 9 not in front.finished():
        front.turn()
    late = [d.request for d in front.deltas[before:] if d.request != 9]
    assert len(late) <= 4, "only the step in flight"
    front.finish()
    for r in (*made, user):
        assert front.tokens(r.id) == expected(r, 0)
    front.assert_nothing_is_held()


def test_rows_made_for_training_take_no_seat_before_their_share(front: Front) -> None:
    front.duty.may_train(True, True)
    front.duty.note_training(1e6)
    front.send(m.Submit(request(0, max_tokens=8)), m.Submit(background(request(1))))
    front.turn(3)
    assert (front.scheduler.queue.num_running, front.scheduler.queue.num_waiting) == (1, 1)
    front.finish()
    assert front.tokens(1) == expected(request(1), 0)


def test_a_user_s_request_gets_a_slot_of_those_made_for_training(make_front: MakeFront) -> None:
    front = make_front(max_loras=1)
    front.load("a", "b")
    made = background(request(0, "a", max_tokens=30))
    front.send(m.Submit(made))
    front.turn(3)
    user = request(1, "b", max_tokens=4)
    front.send(m.Submit(user))
    front.finish()
    order = [d.request for d in front.deltas if d.finish]
    assert order == [1, 0]
    assert [front.tokens(r.id) for r in (made, user)] == [expected(r, 0) for r in (made, user)]
    front.assert_nothing_is_held()


def test_nothing_gives_way_that_would_not_help(make_front: MakeFront) -> None:
    """A user's request waits for another user's slot: rows made for training lose nothing to it."""
    front = make_front(max_loras=1)
    front.load("a", "b")
    asked = [request(0, "a", max_tokens=20), background(request(1, max_tokens=20)), request(2, "b", max_tokens=2)]
    for r in asked:
        front.send(m.Submit(r))
        front.turn()
    front.finish()
    assert front.scheduler.queue.preemptions == 0
    assert [front.tokens(r.id) for r in asked] == [expected(r, 0) for r in asked]


def test_gradients_and_rows_made_for_training_take_turns(front: Front, trainers: Slices) -> None:
    """Neither waits for the other's end, be there users or not."""
    for users in ((), (request(8, max_tokens=30),)):
        made = background(request(len(users), max_tokens=10))
        trainers.done.clear()
        front.send(*map(m.Submit, (*users, made)), a_pass(2, slices=40))
        seen = []
        while made.id not in front.finished():
            owe(front)
            front.turn()
            seen.append(len(trainers.done))
        assert 5 < seen[-1] < 40
        front.finish()
        assert front.tokens(made.id) == expected(made, 0)


# --- publishing and saving ---------------------------------------------------------------------------------------


def test_what_is_published_serves_without_a_folder_until_it_is_unloaded(
    make_front: MakeFront, trainers: Slices
) -> None:
    """However little room there is: it is nowhere else."""
    front = make_front(trainers=trainers, most_loaded=1)
    front.send(
        open_trainer(1), m.PublishTrainer(2, "p"), m.OptimStep(3, "p", AdamParams(0.1)), m.PublishTrainer(4, "p")
    )
    front.finish()
    assert [x.info.digest for x in front.got(m.AdapterLoaded)] == ["p0", "p1"]
    front.load("a", "b")
    asked = [request(i, name, max_tokens=4) for i, name in enumerate(["p0", "a", "p1", "b", "p0"])]
    front.send(*map(m.Submit, asked))
    front.finish()
    assert [front.tokens(r.id) for r in asked] == [expected(r, 0) for r in asked]
    assert {"p0", "p1"} <= set(front.weights)
    front.send(m.UnloadAdapter(5, "p0"), m.Submit(request(9, "p0")))
    front.finish()
    assert "p0" not in front.weights
    assert [f.code for f in front.got(m.Failed)] == ["model_not_found"]
    front.assert_nothing_is_held()


@pytest.mark.promise("FLT-51")
def test_a_version_that_is_published_while_every_slot_is_taken_waits_for_one(
    make_front: MakeFront, trainers: Slices
) -> None:
    """Publishing waits for nothing; who asks for the version is counted as waiting, and who runs goes on."""
    front = make_front(trainers=trainers, max_loras=1)
    front.load("a")
    running, asked = request(0, "a", max_tokens=40), request(1, "p0", max_tokens=4)
    front.send(m.Submit(running))
    front.turn(3)
    front.send(open_trainer(2), m.PublishTrainer(3, "p"))
    while not any(answer.call == 3 for answer in front.got(m.AdapterLoaded)):
        front.turn()
    front.send(m.Submit(asked))
    front.turn(3)
    while 0 not in front.finished():
        assert not front.tokens(1)
        now = front.got(m.Occupancy)[-1]
        assert (now.running, now.waiting) == (1, 1)
        front.turn()
    front.finish()
    assert [front.tokens(r.id) for r in (running, asked)] == [expected(r, 0) for r in (running, asked)]
    front.assert_nothing_is_held()


def test_what_was_saved_may_leave_memory_and_comes_back(make_front: MakeFront, trainers: Slices) -> None:
    front = make_front(trainers=trainers, most_loaded=1)
    front.send(open_trainer(1), m.PublishTrainer(2, "p"))
    front.finish()
    front.send(m.KnowAdapter(adapter("p0").info, AdapterSource("/saved/p0")))
    front.load("a")
    assert list(front.weights) == ["a"]
    front.send(m.Submit(request(0, "p0")))
    front.finish()
    assert front.tokens(0) == expected(request(0, "p0"), 0)
    front.assert_nothing_is_held()


def test_what_cannot_be_served_is_not_published(front: Front) -> None:
    front.send(open_trainer(2, "wide"), m.PublishTrainer(3, "wide"))
    front.finish()
    assert failures(front) == [(3, "invalid_value")]
    assert not front.weights


def test_learning_goes_on_while_a_checkpoint_is_written(front: Front, trainers: Slices) -> None:
    """And what is written is how it was when it was asked for."""
    trainers.may_write.clear()
    front.send(m.SaveTrainer(2, "p", "/one"), m.OptimStep(3, "p", AdamParams(0.1)), m.SaveTrainer(4, "p", "/two"))
    while not trainers.writing.is_set() or not front.got(m.Stepped):
        front.turn()
    assert not front.got(m.CallDone)
    front.send(m.Submit(request(0)))
    while 0 not in front.finished():
        front.turn()
    assert front.core.stats().training_jobs == 2
    trainers.may_write.set()
    front.finish()
    assert [x.call for x in front.got(m.CallDone)] == [2, 4]
    assert trainers.done == ["step p", "write p0 /one", "write p1 /two"]


def test_a_checkpoint_that_cannot_be_written_says_why(front: Front, trainers: Slices) -> None:
    trainers.fail["write p0 /full"] = OSError(28, "No space left on device")
    front.send(m.SaveTrainer(2, "p", "/full"), m.SaveTrainer(3, "p", "/fine"))
    front.finish()
    (failed,) = front.got(m.CallFailed)
    assert (failed.call, failed.code) == (2, "engine_error")
    assert "No space left" in failed.message
    assert [x.call for x in front.got(m.CallDone)] == [3]
