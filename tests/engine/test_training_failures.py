"""Failures of learning in the engine's loop, which stay its own, and how it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from mlx_tandem.engine import messages as m
from mlx_tandem.engine.core import EngineFailure
from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.engine.plan import DeviceError, OutOfMemory
from mlx_tandem.types import AdapterRef, Request
from tests.engine.front import Front, request
from tests.engine.slices import Slices, a_pass, failures, open_trainer, owe
from tests.engine.workloads import expected

MakeFront = Callable[..., Front]


@pytest.fixture
def front(learning_front: Front) -> Front:
    return learning_front


@pytest.mark.promise("FLT-52")
@pytest.mark.parametrize("kind", [DeviceError, OutOfMemory, RuntimeError])
def test_a_failure_fails_its_message_and_nothing_else(front: Front, trainers: Slices, kind: type[Exception]) -> None:
    trainers.fail["slice 1"] = kind("out of memory at 0x7f00")
    front.send(m.Submit(request(0, max_tokens=12)), a_pass(2), m.OptimStep(3, "p", AdamParams(0.1)))
    front.finish()
    (failed,) = front.got(m.CallFailed)
    assert (failed.call, failed.code) == (2, "engine_error")
    assert "0x7f00" not in failed.message
    assert trainers.done == ["slice 0", "slice 1", "drop p", "step p"]
    assert [x.call for x in front.got(m.Stepped)] == [3]
    assert front.tokens(0) == expected(request(0, max_tokens=12), 0)


@pytest.mark.parametrize("slice_", [0, 1, 2])
def test_a_slice_that_fails_when_it_is_read_counts_once(front: Front, trainers: Slices, slice_: int) -> None:
    """Also when the next was launched already, or all were."""
    trainers.fail[f"wait {slice_}"] = DeviceError("broken")
    front.send(m.Submit(request(0, max_tokens=12)), a_pass(2), m.OptimStep(3, "p", AdamParams(0.1)))
    front.finish()
    assert trainers.done.count("drop p") == 1
    assert len(front.core._failures) == 1
    assert [x.call for x in front.got(m.Stepped)] == [3]
    assert len(front.got(m.CallFailed)) + len(front.got(m.PassDone)) == 1
    assert front.tokens(0) == expected(request(0, max_tokens=12), 0)
    front.assert_nothing_is_held()


def test_a_step_is_not_lost_with_a_slice_that_fails_before_it(front: Front, trainers: Slices) -> None:
    """Where the device is waited for before the step is launched. The slice's time is learning's."""
    front.runner.waits = lambda plan: True  # type: ignore[method-assign]
    trainers.fail["wait 0"] = DeviceError("broken")
    front.send(a_pass(2, slices=1))
    front.turn()
    front.duty.may_train(True, True)
    front.duty.note_training(1e6)
    before = front.duty.training_ms
    front.send(m.Submit(request(0, max_tokens=4)))
    front.turn()
    assert front.duty.training_ms > before
    front.finish()
    assert front.tokens(0) == expected(request(0, max_tokens=4), 0)
    assert len(front.core._failures) == 1
    front.assert_nothing_is_held()


def test_three_failures_of_the_device_in_a_minute_end_the_engine(
    front: Front, trainers: Slices, clock: list[float]
) -> None:
    trainers.fail["slice 0"] = DeviceError("broken")
    for call in (2, 3):
        front.send(a_pass(call))
        front.turn()
        clock[0] += 20
    front.send(a_pass(4))
    with pytest.raises(EngineFailure):
        front.turn()
    front.receive()
    assert [call for call, _ in failures(front)] == [2, 3, 4]


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), ValueError("broken"), DeviceError("compiled once more", again=True)]
)
def test_failures_that_are_not_the_device_s_never_do(front: Front, trainers: Slices, error: Exception) -> None:
    trainers.fail["slice 0"] = error
    for call in range(2, 12):
        front.send(a_pass(call))
        front.turn()
    front.finish()
    assert [call for call, _ in failures(front)] == list(range(2, 12))
    assert not front.core._failures


def test_memory_that_runs_out_counts_when_it_does_so_twice_in_a_row(front: Front, trainers: Slices) -> None:
    """One pass may simply be too large; if what comes next is as well, the memory is gone."""
    trainers.fail["slice 2"] = OutOfMemory("unable to allocate")
    for call in range(2, 12, 2):
        front.send(a_pass(call), a_pass(call + 1, slices=2))
        front.finish()
    assert len(failures(front)) == len(front.got(m.PassDone)) == 5
    assert not front.core._failures
    front.send(*map(a_pass, (12, 13, 14, 15)))
    with pytest.raises(EngineFailure):
        front.finish()


def test_failures_far_apart_do_not(front: Front, trainers: Slices, clock: list[float]) -> None:
    trainers.fail["slice 0"] = DeviceError("broken")
    for call in range(2, 7):
        front.send(a_pass(call))
        front.turn()
        clock[0] += 31
    assert len(failures(front)) == 5


def test_a_lost_step_before_a_slice_fails_its_requests_and_learning_goes_on(
    make_front: MakeFront, trainers: Slices
) -> None:
    front = make_front(trainers=trainers, fail={1: "wait"})
    front.send(open_trainer(1), m.Submit(request(0)))
    front.turn(3)
    owe(front)
    front.send(a_pass(2))
    front.finish()
    assert [f.request for f in front.got(m.Failed)] == [0]
    assert [x.call for x in front.got(m.PassDone)] == [2]
    front.assert_nothing_is_held()


@pytest.mark.promise("FLT-48")
def test_a_drain_ends_learning_and_finishes_what_is_being_written(front: Front, trainers: Slices) -> None:
    trainers.may_write.clear()
    front.send(m.SaveTrainer(2, "p", "/folder"))
    front.turn()
    front.send(m.Submit(request(0)), a_pass(3, slices=100), a_pass(4))
    front.turn(3)
    ran = len(trainers.done)
    front.send(m.Drain(), m.OptimStep(5, "p", AdamParams(0.1)))
    front.turn()
    trainers.may_write.set()
    front.core.run()
    front.receive()
    assert failures(front) == [(3, "engine_unavailable"), (4, "engine_unavailable"), (5, "engine_unavailable")]
    assert len(trainers.done) == ran + 1
    assert trainers.done[-1] == "write p0 /folder"
    assert [x.call for x in front.got(m.CallDone)] == [2]
    assert front.finished() == {0}


def test_what_is_being_written_is_finished_when_the_front_is_gone(front: Front, trainers: Slices) -> None:
    trainers.may_write.clear()
    front.send(m.SaveTrainer(2, "p", "/folder"))
    front.turn()
    front.socket.close()
    threading.Thread(target=lambda: trainers.writing.wait(60) and trainers.may_write.set()).start()
    front.core.run()
    assert trainers.done == ["write p0 /folder"]


def test_requests_of_a_policy_follow_what_is_published(front: Front) -> None:
    """The whole round: publish, follow, unload the old one, which nobody needs any more."""
    front.send(m.PublishTrainer(2, "p"))
    front.finish()
    front.send(m.OptimStep(3, "p", AdamParams(0.1)), m.PublishTrainer(4, "p"))
    front.finish()
    asked = Request(0, (1, 2, 3), request(0, max_tokens=12).params, AdapterRef("policy", 1, "p0"), follow=True)
    front.send(m.Submit(asked))
    front.turn(3)
    front.send(m.FollowAdapter(AdapterRef("policy", 2, "p1")), m.UnloadAdapter(5, "p0"))
    front.turn(2)
    assert list(front.weights) == ["p1"]
    front.finish()
    versions = [d.version for d in front.deltas]
    assert set(versions) == {1, 2}
    assert versions == sorted(versions)
    front.assert_nothing_is_held()
