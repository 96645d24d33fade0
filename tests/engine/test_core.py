"""The engine's loop on the reference runner, over a socket pair: what goes in, what comes out, what fails alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec import structs

from mlx_tandem.engine import core as core_module
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.core import EngineFailure, Gauges
from mlx_tandem.engine.plan import StepPlan, StepResult
from mlx_tandem.types import AdapterSource, DiskStats, EngineStats, MemoryInUse, Request, SamplingParams
from tests.engine.front import Front, Recording, request
from tests.engine.workloads import VOCAB, expected

# --- requests ----------------------------------------------------------------------------------------------------


def test_requests_come_out_as_they_would_alone(front: Front) -> None:
    requests = [request(i, n=1 + i % 2, length=1 + 3 * i) for i in range(4)]
    front.send(*map(m.Submit, requests))
    front.finish()
    for r in requests:
        for choice in range(r.n):
            assert front.tokens(r.id, choice) == expected(r, choice)
    assert front.finished() == {0, 1, 2, 3}
    front.assert_nothing_is_held()


def test_all_tokens_of_a_step_are_one_message(front: Front) -> None:
    """A frame a step, whatever the number of streams: the other side wakes once."""
    front.send(*(m.Submit(request(i)) for i in range(4)))
    front.finish()
    assert len(front.got(m.Output)) == 6
    assert all(len(output.deltas) == 4 for output in front.got(m.Output))


def test_the_next_step_is_launched_before_the_last_is_read(front: Front) -> None:
    front.send(m.Submit(request(0, max_tokens=4)))
    front.finish()
    steps = ["launch 0", "launch 1", "wait 0", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert front.runner.calls == steps


@pytest.mark.promise("D4")
@pytest.mark.parametrize(
    ("bad", "param", "code"),
    [
        (Request(9, (), SamplingParams(max_tokens=1)), "prompt", "invalid_value"),
        (Request(9, (VOCAB,), SamplingParams(max_tokens=1)), "prompt", "invalid_value"),
        (Request(9, (1,), SamplingParams(max_tokens=100)), "max_tokens", "context_length_exceeded"),
        (request(9, "nobody"), "model", "model_not_found"),
        (request(0), "id", "invalid_value"),
    ],
)
def test_a_bad_request_fails_alone(front: Front, bad: Request, param: str, code: str) -> None:
    front.send(m.Submit(request(0)), m.Submit(bad), m.Submit(request(1)))
    front.finish()
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.param, failed.code, failed.retryable) == (bad.id, param, code, False)
    assert front.finished() == {0, 1}
    assert front.tokens(1) == expected(request(1), 0)


def test_a_cancelled_request_is_silent_and_holds_nothing(front: Front) -> None:
    front.send(m.Submit(request(0, max_tokens=40)), m.Submit(request(1)))
    front.turn(4)
    front.send(m.Cancel(0))
    front.turn()
    before = len(front.tokens(0))
    assert front.scheduler.requests == {1}
    front.finish()
    assert len(front.tokens(0)) == before
    assert front.tokens(1) == expected(request(1), 0)
    front.assert_nothing_is_held()


def test_a_cancelled_choice_leaves_the_others(front: Front) -> None:
    r = request(0, n=3, max_tokens=20)
    front.send(m.Submit(r))
    front.turn(4)
    front.send(m.Cancel(0, 1), m.Cancel(5), m.Cancel(0, 9))
    front.finish()
    for choice in (0, 2):
        assert front.tokens(0, choice) == expected(r, choice)
    assert len(front.tokens(0, 1)) < 20
    front.assert_nothing_is_held()


def test_a_request_is_accepted_before_a_step_keeps_the_engine_busy(front: Front) -> None:
    """A refused one is not."""
    told: list[list[int]] = []

    def launch(plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        front.receive()
        told.append([accepted.request for accepted in front.got(m.Accepted)])
        return Recording.launch(front.runner, plan, on_built)

    front.runner.launch = launch  # type: ignore[method-assign]
    front.send(m.Submit(request(0)), m.Submit(request(1, max_tokens=0)), m.Submit(request(2)))
    front.finish()
    assert told[0] == [0, 2] == told[-1]
    assert [failed.request for failed in front.got(m.Failed)] == [1]


def test_what_a_client_that_left_had_waited_for_is_there_when_it_asks_again(front: Front) -> None:
    """Its adapter is held until what was read is kept, and then no longer."""
    front.load("a")
    front.scheduler.prefill._chunk_tokens = 8
    prompt = tuple(i * i % VOCAB for i in range(40))
    first, second = (structs.replace(request(i, "a"), prompt=prompt) for i in range(2))
    front.send(m.Submit(first))
    front.turn(3)
    (s,) = front.scheduler.queue.running
    read = s.scheduled
    assert 8 <= read < 40
    front.send(m.Cancel(0))
    front.turn()
    assert front.core._adapters.holds._held == {0: "a"}
    front.finish()
    front.assert_nothing_is_held()
    assert front.tokens(0) == []
    front.send(m.Submit(second))
    front.finish()
    assert front.deltas[0].cached >= read // 4 * 4
    assert front.tokens(1) == expected(second, 0)


# --- what is told of times and loads ------------------------------------------------------------------------------


def test_each_request_starts_once_when_its_first_row_is_planned(front: Front) -> None:
    """Four run at once: the fifth starts when a seat is free. A prompt that is known whole starts, too."""
    before = time.monotonic()
    front.send(*(m.Submit(request(i, n=2, max_tokens=3 + i)) for i in range(3)))
    front.turn()
    assert [s.request for s in front.got(m.Started)] == [0, 1], "two requests of two choices have all seats"
    front.finish()
    front.send(m.Submit(request(3, n=2)), m.Cancel(9))
    front.finish()
    started = front.got(m.Started)
    assert [s.request for s in started] == [0, 1, 2, 3]
    assert before <= started[0].at <= started[1].at <= started[2].at <= started[3].at <= time.monotonic()
    first = {
        d.request: i for i, d in reversed(list(enumerate(front.received))) if isinstance(d, m.Output) for d in d.deltas
    }
    for s in started:
        assert front.received.index(s) < first[s.request], "it is said before its first token"


def test_who_is_cancelled_before_the_first_row_never_starts(front: Front) -> None:
    front.send(m.Submit(request(0, n=4)), m.Submit(request(1)))
    front.turn()
    front.send(m.Cancel(1))
    front.finish()
    assert [s.request for s in front.got(m.Started)] == [0]


def test_each_preemption_is_told(front: Front) -> None:
    """31 blocks of 4 tokens are too few for four sequences of 60."""
    front.send(*(m.Submit(request(i, max_tokens=50)) for i in range(4)))
    front.finish()
    told = [p.request for p in front.got(m.Preempted)]
    assert len(told) == front.core.stats().preemptions > 0
    assert set(told) <= {1, 2, 3}, "the oldest is never preempted"
    assert [s.request for s in front.got(m.Started)] == [0, 1, 2, 3], "who comes back does not start again"


def test_steps_are_counted_by_their_tokens_and_rows(front: Front) -> None:
    """A prompt of 12 tokens and 5 more tokens that are read, alone in a batch of four seats."""
    front.send(m.Submit(request(0, length=12, max_tokens=6)))
    front.finish()
    stats = front.core.stats()
    assert sum(stats.step_tokens) == sum(stats.batch_fill) == stats.steps
    assert stats.step_tokens_sum == 17
    assert stats.batch_fill == (0, 0, stats.steps, 0, 0, 0, 0, 0, 0, 0), "a quarter of the seats"
    assert stats.step_tokens[0] == 5, "steps of one token"
    assert stats.prompt_tokens_per_s > 0 and stats.decode_tokens_per_s > 0
    front.send(*(m.Submit(request(i)) for i in range(1, 5)))
    front.finish()
    assert front.core.stats().batch_fill[9] > 0, "four rows fill the batch"


def test_every_statistic_says_what_has_happened(front: Front) -> None:
    """Three requests alone, then seven at once, of which four have seats and two steps have been read. What takes more
    to happen, and what is measured, is put in at its source."""
    front.load("a", "b")
    for asked in (request(0, length=12), request(1, "a", n=2, length=9, max_tokens=3), request(2, length=12)):
        front.send(m.Submit(asked))
        front.finish()
    front.send(*(m.Submit(request(10 + i, "b", max_tokens=30, length=3)) for i in range(7)))
    front.turn(3)
    front.duty.serving_ms, front.duty.training_ms = 101.0, 102.0
    front.core._gauges = Gauges(front.pool, front.slots, lambda: MemoryInUse(103, 104, 105, 106), lambda: 107)
    front.core._step_failures, front.scheduler.queue.preemptions = 108, 109
    front.core._adapters.store.evictions = 110
    front.send(m.Report(5))
    front.core._receive()
    front.core._send()
    front.receive()
    assert front.got(m.Occupancy)[-1] == m.Occupancy(running=4, waiting=3, used_blocks=8, free_blocks=23)
    stats = front.got(m.Heartbeat)[-1].stats
    measured = ("step_ms", "prompt_tokens_per_s", "decode_tokens_per_s")
    assert all(getattr(stats, name) > 0 for name in measured)
    assert structs.replace(stats, **dict.fromkeys(measured, 0.0)) == EngineStats(
        cached_blocks=12,
        prefix_queries=12 + 9 + 12 + 4 * 3,
        prefix_hits=11,
        prefix_evictions=0,
        steps=6 + 4 + 6 + 2,
        prompt_tokens=12 + 9 + 12 + 7 * 3,
        generated_tokens=6 + 2 * 3 + 6 + 4 * 2,
        preemptions=109,
        step_failures=108,
        active_memory=103,
        peak_memory=104,
        kept_memory=105,
        compiled_steps=106,
        resident_adapters=("a", "b"),
        loaded_adapters=2,
        loaded_adapter_bytes=128,
        adapter_evictions=110,
        adapter_slot_bytes=107,
        lora_rows=1 + 2 * 3 + 4 * 2,
        rows=6 + (1 + 2 * 3) + 6 + 4 * 2,
        serving_ms=101.0,
        training_ms=102.0,
        step_tokens=(11, 5, 2, *[0] * 11),
        step_tokens_sum=(12 + 5) + (8 + 2 * 3) + (1 + 5) + 4 * (3 + 1),
        batch_fill=(0, 0, 13, 0, 3, 0, 0, 0, 0, 2),
    )


@pytest.mark.parametrize("odd", [{}, {"first_use": True}, {"scores": {0: []}}], ids=["usual", "traced", "scored"])
def test_steps_that_say_nothing_about_others_do_not_teach_what_steps_cost(
    front: Front, monkeypatch: pytest.MonkeyPatch, odd: dict[str, Any]
) -> None:
    """The first step of its kind takes seconds on some devices, after which prompts would be read in small pieces."""
    noted: list[StepPlan] = []
    monkeypatch.setattr(front.scheduler.prefill.cost, "observe_step", lambda plan, ms: noted.append(plan))
    wait = front.runner.wait
    monkeypatch.setattr(front.runner, "wait", lambda handle: replace(wait(handle), **odd))
    front.send(m.Submit(request(0, max_tokens=4)))
    front.finish()
    assert len(noted) == (0 if odd else 4)
    assert front.core.stats().steps == 4, "they count all the same"


# --- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("FLT-01")
@pytest.mark.parametrize("where", ["launch", "half", "wait"])
def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(make_front: Callable[..., Front], where: str) -> None:
    front = make_front(fail={3: where})
    front.send(m.Submit(request(0)), m.Submit(request(1)))
    front.finish()
    front.send(m.Submit(request(2)))
    front.finish()
    assert {(f.request, f.code, f.retryable) for f in front.got(m.Failed)} == {
        (0, "step_failed", True),
        (1, "step_failed", True),
    }
    assert front.tokens(2) == expected(request(2), 0)
    assert front.finished() == {2}
    assert front.core.stats().step_failures == 1
    assert front.runner.calls.count("reset") == 1
    front.assert_nothing_is_held()


def test_a_step_that_can_be_computed_again_fails_nobody(make_front: Callable[..., Front]) -> None:
    """However often: it is no reason to end the engine."""
    steps = {1, 4, 7, 10}  # what is launched behind one that fails is lost with it
    front = make_front(fail=dict.fromkeys(steps, "wait"), again=frozenset(steps))
    requests = [request(i, max_tokens=12) for i in range(2)]
    front.send(*map(m.Submit, requests))
    front.finish()
    assert not front.got(m.Failed)
    assert [front.tokens(r.id) for r in requests] == [expected(r, 0) for r in requests]
    assert front.core.stats().step_failures == len(steps)
    front.assert_nothing_is_held()


def test_a_row_that_is_not_finite_fails_its_request(make_front: Callable[..., Front]) -> None:
    front = make_front(nan={2: 0})
    front.send(m.Submit(request(0)), m.Submit(request(1)))
    front.finish()
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.code, failed.retryable) == (0, "numerical_error", True)
    assert front.tokens(1) == expected(request(1), 0)
    assert front.tokens(0) == expected(request(0), 0)[:2]
    front.assert_nothing_is_held()


@pytest.mark.promise("FLT-09")
def test_three_failed_steps_in_a_minute_end_the_engine(make_front: Callable[..., Front], clock: list[float]) -> None:
    """And everybody is told first."""
    front = make_front(fail={0: "launch", 1: "launch", 2: "launch"})
    for i in range(2):
        front.send(m.Submit(request(i)))
        front.turn()
        clock[0] += 20
    front.send(m.Submit(request(2)))
    with pytest.raises(EngineFailure):
        front.turn()
    front.receive()
    assert [f.request for f in front.got(m.Failed)] == [0, 1, 2]


def test_failed_steps_far_apart_do_not(make_front: Callable[..., Front], clock: list[float]) -> None:
    front = make_front(fail=dict.fromkeys(range(6), "launch"))
    for i in range(6):
        front.send(m.Submit(request(i)))
        front.turn()
        clock[0] += 31
    assert len(front.got(m.Failed)) == 6


@pytest.mark.promise("FLT-12")
def test_a_broken_invariant_is_not_swallowed(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(handle: Any) -> StepResult:
        return StepResult([])

    monkeypatch.setattr(front.runner, "wait", wrong)
    front.send(m.Submit(request(0)))
    with pytest.raises((AssertionError, ValueError)):
        front.core.run()


# --- the end -----------------------------------------------------------------------------------------------------


def test_a_drain_finishes_what_runs_and_takes_nothing_new(front: Front) -> None:
    front.send(m.Submit(request(0)), m.Submit(request(1)), m.Drain(), m.Submit(request(2)))
    front.core.run()
    front.receive()
    assert front.finished() == {0, 1}
    assert front.tokens(1) == expected(request(1), 0)
    (failed,) = front.got(m.Failed)
    assert (failed.request, failed.code, failed.retryable) == (2, "engine_unavailable", True)


def test_an_idle_engine_drains_at_once(front: Front) -> None:
    front.send(m.Drain())
    front.core.run()


def test_the_engine_ends_when_its_front_is_gone(front: Front) -> None:
    front.send(m.Submit(request(0, max_tokens=50)))
    front.turn(2)
    front.socket.close()
    front.core.run()


def test_the_runner_is_told_that_no_step_comes_before_the_engine_rests(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have made the next step ready, which would keep the device waiting for its plan."""
    receive, rested = front.core._channel.receive, []

    def watched(wait: float) -> list[m.Inbound]:
        if wait:
            rested.append(front.reference.awaits_plan)
        return receive(0.0)

    monkeypatch.setattr(front.core._channel, "receive", watched)
    front.core._heartbeat_seconds = 1e9
    for number in range(3):
        front.send(m.Submit(request(number, max_tokens=1 + number)))
        front.finish()
        rested.clear()
        front.turn(2)
        assert rested == [False, False]


# --- occupancy ---------------------------------------------------------------------------------------------------


def test_how_full_the_engine_is_comes_with_its_outputs(front: Front) -> None:
    front.send(m.Submit(request(0, max_tokens=20)))
    front.turn(4)
    now = front.got(m.Occupancy)[-1]
    assert (now.running, now.waiting, now.used_blocks > 0) == (1, 0, True)
    front.finish()
    assert front.got(m.Occupancy)[-1].used_blocks == 0


def test_room_that_a_cancellation_makes_is_told_at_once(front: Front) -> None:
    front.core._heartbeat_seconds = 1e9
    front.send(m.Submit(request(0, max_tokens=40)))
    front.turn(3)
    front.send(m.Cancel(0))
    front.turn()
    assert front.got(m.Occupancy)[-1].used_blocks == 0


def test_who_asks_is_told_of_all_that_was_said_before(front: Front) -> None:
    """Also of a cancellation in the same frame, between two heartbeats."""
    front.core._heartbeat_seconds = 1e9
    front.send(m.Submit(request(0, max_tokens=40)), m.Submit(request(1)))
    front.turn(3)
    told = len(front.got(m.Heartbeat))
    front.send(m.Cancel(0), m.Cancel(1), m.Report(7), m.Report(8))
    front.turn()
    assert [done.call for done in front.got(m.CallDone)] == [7, 8]
    assert [report.stats.steps for report in front.got(m.Heartbeat)[told:]] == [2, 2]
    assert front.got(m.Occupancy)[-1].running == 0


def test_blocks_that_were_not_written_are_counted_once_wherever_that_was_decided(front: Front) -> None:
    """Blocks that the drive refused count as dropped, and so do blocks that were reused before they were written."""
    drive = DiskStats(*[1] * 8, 30, *[1] * 4, 1.0, False, False, "")
    front.core._opening = cast(Any, SimpleNamespace(cache=SimpleNamespace(stats=lambda: drive)))
    saves, reads = SimpleNamespace(unsaved=9), SimpleNamespace(hit_tokens=4)
    front.core._offload = cast(Any, SimpleNamespace(saves=saves, reads=reads))
    stats = front.core.stats()
    assert stats.disk is not None
    assert (stats.disk.dropped, stats.disk_unsaved, stats.disk.evicted) == (39, 9, 1)


# --- everything at once ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_messages_is_survived(
    make_front: Callable[..., Front], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submits, cancels, loads, unloads and failing steps, at random: every request ends once, and exactly."""
    monkeypatch.setattr(core_module, "STRIKES", 10_000)
    rng = Random(seed)
    front = make_front(
        fail={i: rng.choice(("launch", "half", "wait")) for i in range(300) if rng.random() < 0.03},
        nan={i: rng.randrange(4) for i in range(300) if rng.random() < 0.02},
    )
    requests: dict[int, Request] = {}
    cancelled: set[int] = set()
    names = ["a", "b", "c", "d"]
    front.load("a", "b", "c")
    for _ in range(150):
        if rng.random() < 0.35:
            r = request(
                len(requests),
                rng.choice([None, *names]),
                max_tokens=rng.randint(1, 8),
                n=rng.randint(1, 3),
                length=rng.randint(1, 9),
            )
            requests[r.id] = r
            front.send(m.Submit(r))
        if requests and rng.random() < 0.05:
            r = rng.choice(list(requests.values()))
            cancelled.add(r.id)
            front.send(m.Cancel(r.id))
        if rng.random() < 0.08:
            front.send(m.UnloadAdapter(1, rng.choice(names)))
        if rng.random() < 0.08:
            front.send(m.LoadAdapter(2, AdapterSource(f"/adapters/{rng.choice(names)}")))
        front.turn()
    front.finish()
    failed = [f.request for f in front.got(m.Failed)]
    assert len(failed) == len(set(failed))
    for r in requests.values():
        for choice in range(r.n):
            tokens, want = front.tokens(r.id, choice), expected(r, choice)
            assert tokens == want[: len(tokens)]
            ends = [d for d in front.deltas if (d.request, d.choice) == (r.id, choice) and d.finish]
            assert len(ends) <= 1
            if r.id not in failed and r.id not in cancelled:
                assert tokens == want
                assert len(ends) == 1
    front.assert_nothing_is_held()
    assert set(front.slots.residents()) <= set(front.weights)
