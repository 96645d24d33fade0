"""The scheduler, its pool and its slots on the reference runner: every sequence says what it says alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_tandem.engine import prefill, prefix_leaders, run_queue
from mlx_tandem.engine.plan import Runner, StepPlan
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import Request, SamplingParams
from tests.engine.mutants import FOUND_BY, OF_SPOILS, OF_STATES, PLANTS
from tests.engine.mutants.corruptions import CORRUPTIONS, Corrupting
from tests.engine.random_workloads import Outcome, Settings, play
from tests.engine.reference import ReferenceRunner
from tests.engine.workloads import Engine, assert_exact, expected, make_engine, request

PATIENCE = 2


@pytest.fixture(autouse=True)
def _little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that random workloads reach it; and they wait for one another's prompts for little."""
    monkeypatch.setattr(run_queue, "OVERTAKEN_FOR_SLOT", PATIENCE)
    monkeypatch.setattr(prefix_leaders, "WORTH_WAITING", 1)


# --- random workloads --------------------------------------------------------------------------------------------


WORKLOADS = int(os.environ.get("TANDEM_WORKLOADS", "1800"))


@pytest.mark.promise("F9", "PRP-2", "DET-0")
@pytest.mark.parametrize("part", range(3))
def test_every_sequence_is_exact_in_random_workloads(part: int) -> None:
    """Mixed adapters, preemption, cancels, failing steps, rows that are not finite, at depth 0 and 1."""
    outcome = Outcome()
    each = WORKLOADS // 3
    for seed in range(part * each, (part + 1) * each):
        try:
            outcome += play(Random(seed))
        except Exception as e:
            e.add_note(f"in workload {seed}")
            raise
    # The workloads are only worth something while they reach what they are for.
    assert outcome.finished > 3000
    assert min(outcome.preemptions, outcome.failures, outcome.failed, outcome.cancelled) > 200
    assert outcome.cached > 1500
    assert outcome.piggybacked > 200, outcome
    assert outcome.masked > 3000, outcome
    assert min(outcome.accepted, outcome.drafted - outcome.accepted) > 1000, outcome
    assert outcome.floated > 150, outcome
    assert min(outcome.moved, outcome.switched, outcome.held_back) > 100, outcome
    assert outcome.messages > 100, outcome


@settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False))
def test_every_sequence_is_exact_in_searched_workloads(rng: Random) -> None:
    """The same, with Hypothesis choosing: a failure shrinks to a small workload."""
    play(rng, Settings(most_requests=5))


def _found_within(
    workloads: int,
    settings: Settings | None = None,
    wrap: Callable[[ReferenceRunner], Runner] = lambda runner: runner,
    first: int = 0,
) -> bool:
    """Whether any of so many workloads fails; `first` is tried before the others."""
    for seed in (first, *range(workloads)):
        try:
            play(Random(seed), settings, wrap)
        except (TypeError, AttributeError, NameError):
            raise  # the bug was not planted as it was meant to be
        except Exception:
            return True
    return False


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_the_suite_finds_corrupted_plans(name: str) -> None:
    assert _found_within(100, wrap=lambda runner: Corrupting(runner, CORRUPTIONS[name]()))


@pytest.mark.promise("PRP-2")
@pytest.mark.parametrize("name", PLANTS)
def test_the_suite_finds_planted_bugs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTS[name](monkeypatch)
    settings = Settings(states=1.0) if name in OF_STATES else Settings(spoils=0.2) if name in OF_SPOILS else None
    assert _found_within(1500, settings, first=FOUND_BY.get(name, 0))


# --- failures, step by step --------------------------------------------------------------------------------------


def _fixed_workload(engine: Engine) -> None:
    """Chunked prompts, a fork, two adapters, one sequence that waits for a seat."""
    for r in (
        request(0, (1, 2, 3, 4, 5, 6, 7), n=2, adapter="a"),
        request(1, (3,), adapter="b", temperature=0.0),
        request(2, tuple(range(12)), adapter="a", max_tokens=3, penalty=0.5),
        request(3, (1, 2, 3), n=2, max_tokens=4),
    ):
        engine.loop.add(r)


def _steps_of_fixed_workload(depth: int) -> int:
    engine = make_engine(max_num_seqs=5, num_blocks=16, depth=depth)
    _fixed_workload(engine)
    engine.loop.run()
    assert len(engine.loop.finished) == 6
    return engine.runner.launches


@pytest.mark.promise("FLT-01")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["launch", "half", "wait"])
def test_a_failed_step_ends_its_own_requests_only(depth: int, where: Literal["launch", "half", "wait"]) -> None:
    """For every step of a workload: rows in flight fail, all others are exact, and so is what comes after."""
    for n in range(_steps_of_fixed_workload(depth)):
        engine = make_engine(max_num_seqs=5, num_blocks=16, depth=depth, fail={n: where})
        loop = engine.loop
        _fixed_workload(engine)
        while not loop.failures:
            assert loop.step(), "the failure never came"
        loop.add(request(9, (5, 5), adapter="b"))
        loop.run()
        loop.assert_idle()
        assert_exact(loop)
        assert (9, 0) in loop.finished
        assert loop.failures == 1
        assert loop.failed, "a step has rows"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("where", ["launch", "half", "wait"])
def test_a_step_that_can_be_computed_again_ends_nobody(depth: int, where: Literal["launch", "half", "wait"]) -> None:
    """For every step of a workload: all are exact, as if nothing had happened."""
    for n in range(_steps_of_fixed_workload(depth)):
        engine = make_engine(
            max_num_seqs=5, num_blocks=16, depth=depth, fail={n: where, n + 2: where}, again=frozenset({n, n + 2})
        )
        loop = engine.loop
        _fixed_workload(engine)
        loop.run()
        loop.assert_idle()
        assert_exact(loop)
        assert loop.failures and not loop.failed
        assert len(loop.finished) == 6


def test_a_step_that_failed_while_others_ran_leaves_them_exact() -> None:
    """Survivors are computed again: nothing in the cache is trusted after a failure."""
    engine = make_engine(depth=0, fail={6: "half"}, max_num_seqs=2)
    loop = engine.loop
    loop.add(request(0, (1, 2, 3), max_tokens=12))
    for _ in range(3):
        loop.step()
    loop.add(request(1, (4, 5, 6)))
    loop.add(request(2, (7, 8, 9)))  # waits for a seat, so it is in no step
    loop.run()
    loop.assert_idle()
    assert_exact(loop)
    assert loop.failed == {0, 1}
    assert (2, 0) in loop.finished


@pytest.mark.promise("FLT-04")
@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_that_is_not_finite_fails_its_request_only(depth: int) -> None:
    for n in range(_steps_of_fixed_workload(depth)):
        for row in range(3):
            engine = make_engine(max_num_seqs=5, num_blocks=16, depth=depth, nan={n: row})
            _fixed_workload(engine)
            loop = engine.loop.run()
            loop.assert_idle()
            assert_exact(loop)
            assert len(loop.failed) <= 1
            assert not loop.failures


# --- cancels -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("FLT-41")
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("choice", [None, 0, 1, 2])
def test_a_cancel_at_any_moment_races_the_end_cleanly(depth: int, choice: int | None) -> None:
    """One terminal event for each choice, and what it held is free at once."""
    steps = _race(depth, None, choice)
    outcomes = set()
    for moment in range(steps + 1):
        _race(depth, moment, choice)
        outcomes.add(moment)
    assert len(outcomes) > 5


def _race(depth: int, moment: int | None, choice: int | None) -> int:
    engine = make_engine(max_num_seqs=4, num_blocks=16, depth=depth)
    loop = engine.loop
    loop.add(request(0, (1, 2, 3, 4, 5, 6), n=3, adapter="a"))
    loop.add(request(1, (1, 2), adapter="b"))
    while True:
        if loop.steps == moment:
            loop.cancel(0, choice)
            if choice is None and 1 not in {r.id for r in loop.requests.values() if (1, 0) not in loop.finished}:
                assert engine.loop.pool.used_blocks == 0
            loop.cancel(0, choice)  # again: ignored
            loop.cancel(77)  # unknown: ignored
            moment = None
        if not loop.step():
            break
    loop.assert_idle()
    assert_exact(loop)
    for key in ((0, 0), (0, 1), (0, 2)):
        assert (key in loop.finished) != (key in loop.cancelled)
    assert (1, 0) in loop.finished
    return loop.steps


@pytest.mark.promise("FLT-40")
def test_a_cancel_gives_everything_back_at_once() -> None:
    engine = make_engine(max_num_seqs=4)
    loop = engine.loop
    loop.add(request(0, (1, 2, 3, 4, 5, 6), n=4, adapter="a"))
    for _ in range(4):
        loop.step()
    assert loop.pool.used_blocks > 0
    loop.cancel(0)
    assert loop.pool.used_blocks == 0
    assert loop.slots.references("a") == 0
    assert loop.scheduler.queue.num_running == loop.scheduler.queue.num_waiting == 0
    loop.run()
    loop.assert_idle()


def test_an_heir_keeps_its_request_s_place_in_the_queue() -> None:
    """The first choice of a waiting request is cancelled: the others wait where it waited, not before everyone."""
    engine = make_engine(max_num_seqs=3)
    loop = engine.loop
    for i in range(3):
        loop.add(request(i, n=3))
    loop.cancel(2, 0)
    loop.run()
    assert list(loop.admitted) == [0, 1, 2]
    loop.assert_idle()
    assert_exact(loop)


# --- requests ----------------------------------------------------------------------------------------------------


def test_choices_share_one_computation_of_the_prompt() -> None:
    """n choices write the prompt's positions once, but for its last token, which each runs itself."""
    for length in range(1, 14):
        engine = make_engine(depth=0, block_size=4)
        loop = engine.loop
        loop.add(request(0, tuple(range(length)), n=4, max_tokens=3))
        loop.run()
        assert engine.runner.positions == length - 1 + 4 * 3
        assert len({tuple(t) for t in loop.tokens.values()}) > 1, "choices sample on their own"
        assert_exact(loop)


def test_choices_share_the_blocks_of_the_prompt() -> None:
    engine = make_engine(depth=0, block_size=4)
    loop = engine.loop
    loop.add(request(0, tuple(range(9)), n=4, max_tokens=3))
    while len(loop.tokens[0, 3]) < 1:
        loop.step()
    assert loop.pool.used_blocks == 2 + 4  # two shared, and a last one each
    loop.run()
    loop.assert_idle()


def test_a_request_runs_with_all_its_choices_or_waits() -> None:
    engine = make_engine(max_num_seqs=3)
    loop = engine.loop
    loop.add(request(0, n=2))
    loop.add(request(1, n=2))
    loop.step()
    assert (loop.scheduler.queue.num_running, loop.scheduler.queue.num_waiting) == (2, 2)
    loop.run()
    loop.assert_idle()
    assert_exact(loop)


def test_nothing_is_drawn_past_max_tokens() -> None:
    """At depth 1 too no row runs whose token would be thrown away, unless a stop token was drawn meanwhile."""
    for depth in (0, 1):
        engine = make_engine(depth=depth)
        loop = engine.loop
        loop.add(request(0, (1, 2, 3), max_tokens=5))
        loop.run()
        assert engine.runner.positions == 3 + 4
        assert loop.finished == {(0, 0): "length"}


def test_a_stop_token_ends_its_choice() -> None:
    unstopped = expected(request(0, max_tokens=20), 0)
    stop = next(t for i, t in enumerate(unstopped) if i >= 4 and t not in unstopped[:i])
    for depth in (0, 1):
        engine = make_engine(depth=depth)
        loop = engine.loop
        loop.add(request(0, max_tokens=20, stop=(stop,)))
        loop.run()
        assert loop.tokens[0, 0] == unstopped[: unstopped.index(stop) + 1]
        assert loop.finished == {(0, 0): "stop"}
        assert engine.runner.positions == 5 + len(loop.tokens[0, 0]) - 1 + depth


def test_ignore_eos_ignores_the_model_s_ids_and_not_the_request_s() -> None:
    free = expected(request(0, max_tokens=20), 0)
    eos = next(t for i, t in enumerate(free) if i >= 3 and t not in free[:i])
    for ignore, stop, finish in ((False, (), "stop"), (True, (), "length"), (True, (eos,), "stop")):
        engine = make_engine(eos=(eos,))
        params = SamplingParams(max_tokens=20, ignore_eos=ignore, stop_token_ids=stop)
        engine.loop.add(Request(0, (1, 2, 3, 4, 5), params))
        engine.loop.run()
        assert engine.loop.finished == {(0, 0): finish}
        assert_exact(engine.loop, (eos,))


def test_what_is_in_flight_when_its_request_ends_is_passed_over() -> None:
    engine = make_engine(depth=1)
    loop = engine.loop
    loop.add(request(0))
    loop.step()
    loop.cancel(0)
    assert loop.pool.used_blocks > 0, "what was read is kept once that is known to be finite"
    loop.add(request(1, (9,)))
    loop.run()
    assert loop.tokens[0, 0] == []
    assert_exact(loop)
    loop.assert_idle()


def test_an_empty_engine_has_nothing_to_do() -> None:
    engine = make_engine()
    assert engine.scheduler.plan() is None
    engine.loop.assert_idle()


@pytest.mark.promise("FLT-03")
def test_a_request_that_fills_the_pool_alone_runs_beside_others() -> None:
    engine = make_engine(num_blocks=7, block_size=2, max_num_seqs=4)
    loop = engine.loop
    for i in range(4):
        loop.add(request(i, (1, 2, 3, 4), max_tokens=8, temperature=0.0, penalty=1.0))
    loop.run()
    assert loop.scheduler.queue.preemptions > 0
    loop.assert_idle()
    assert_exact(loop)


def test_what_is_over_does_not_come_back_after_preemption() -> None:
    """Preemption while tokens are on the device: they are taken in before the sequence is computed again."""
    preempted = 0
    for blocks in range(6, 12):
        engine = make_engine(num_blocks=blocks, block_size=1, max_num_seqs=3, depth=1)
        for i in range(3):
            engine.loop.add(request(i, (i + 1,), max_tokens=4, penalty=1.0))
        engine.loop.run()
        preempted += engine.scheduler.queue.preemptions
        assert_exact(engine.loop)
        engine.loop.assert_idle()
    assert preempted > 3


def test_adapters_beyond_the_slots_take_turns_within_a_bound() -> None:
    """Two slots; a steady stream of requests for two adapters cannot keep a third waiting."""
    engine = make_engine(max_loras=2, max_num_seqs=4)
    loop = engine.loop
    for i in range(4):
        loop.add(request(i, adapter="ab"[i % 2], max_tokens=5))
    loop.step()
    loop.add(request(4, adapter="c"))
    for i in range(5, 40):
        loop.add(request(i, adapter="ab"[i % 2], max_tokens=1 + i % 5))
        loop.step()
    loop.run()
    loop.assert_idle()
    assert_exact(loop)
    assert loop.admitted[4] <= 4 + PATIENCE


def test_a_resident_adapter_is_not_uploaded_again() -> None:
    engine = make_engine(max_loras=2)
    for i in range(6):
        engine.loop.add(request(i, adapter="ab"[i % 2]))
        engine.loop.run()
    assert engine.runner.uploads == 2


# --- priorities, limits and prompt logprobs ----------------------------------------------------------------------


def test_what_matters_more_runs_first_and_keeps_its_blocks() -> None:
    """One seat at first: the queue is worked off by priority, then in order. With seats for all, but not blocks,
    whatever matters most is never the one that is computed again."""
    engine = make_engine(max_num_seqs=1)
    for i, priority in enumerate((0, 3, -1, 3, 0)):
        engine.loop.add(request(i, priority=priority))
    engine.loop.run()
    assert list(engine.loop.admitted) == [2, 0, 4, 1, 3]

    engine = make_engine(num_blocks=9, block_size=2, max_num_seqs=3)
    for i, priority in enumerate((7, -7, 0)):
        engine.loop.add(request(i, (1, 2), max_tokens=10, priority=priority))
    engine.loop.run()
    assert engine.scheduler.queue.preemptions > 0
    assert list(engine.loop.finished) == [(1, 0), (2, 0), (0, 0)]
    assert_exact(engine.loop)


def test_prompts_read_in_one_step_are_limited() -> None:
    for most in (1, 3):
        engine = make_engine(num_blocks=200, depth=0, prefill_batch_size=most, prefixes=False)
        loop = engine.loop
        for i in range(6):
            loop.add(request(i, tuple(range(12))))
        loop.step()
        assert engine.runner.positions == 12 * most
        loop.run()
        assert_exact(loop)


def test_tokens_in_flight_are_limited_and_one_request_always_runs() -> None:
    engine = make_engine(max_inflight_tokens=25)
    loop = engine.loop
    loop.add(request(0, max_tokens=30))  # alone more than is allowed
    for i in range(1, 6):
        loop.add(request(i, max_tokens=7))  # two fit
    most = 0
    while loop.step():
        most = max(most, loop.scheduler.queue.num_running)
    assert most == 2
    loop.assert_idle()
    assert_exact(loop)


@pytest.mark.promise("D2")
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_s_logprobs_are_computed_once_in_bounded_chunks(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many choices and prompts there are; a chunk of another prompt goes beside."""
    monkeypatch.setattr(prefill, "scored_positions", lambda vocabulary: 5)
    engine = make_engine(depth=0, prefixes=False)
    loop, rows = engine.loop, []
    launch = engine.runner.launch

    def watch(plan: StepPlan) -> object:
        rows.extend(plan.rows)
        scored = [len(row.tokens) for row in plan.rows if row.targets]
        assert sum(scored) <= 5
        return launch(plan)

    monkeypatch.setattr(loop, "runner", SimpleNamespace(launch=watch, wait=engine.runner.wait))
    for i in range(2):
        loop.add(request(i, tuple(range(12)), n=n, prompt_logprobs=2))
    loop.add(request(2, tuple(range(12))))
    loop.step()
    assert engine.runner.positions == 5 + 12
    loop.run()
    assert_exact(loop)
    assert sorted(loop.prompt_logprobs) == [0, 1]
    assert sum(len(row.targets) for row in rows) == 2 * 11


def test_what_is_known_of_a_prompt_is_not_scored_again_after_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "scored_positions", lambda vocabulary: 3)
    engine = make_engine(depth=0)
    loop, scheduler = engine.loop, engine.scheduler
    loop.add(request(0, (1, 2, 3, 4, 5, 6, 7, 8), prompt_logprobs=0))
    scored = []
    for _ in range(2):
        loop.step()
    scheduler.queue.preempt(scheduler.queue.running[0])
    while plan := scheduler.plan():
        scored.append(len(plan.rows[0].targets))
        loop.take(plan, engine.runner.launch(plan))
    assert scored[:3] == [0, 0, 1]
    assert_exact(loop)


def test_nothing_ends_a_choice_before_its_min_tokens() -> None:
    free = expected(request(0, max_tokens=20), 0)
    for least in (0, 5, 19, 20):
        engine = make_engine(eos=(free[0],))
        r = request(0, max_tokens=20, stop=(free[1],), min_tokens=least)
        engine.loop.add(r)
        engine.loop.run()
        assert len(engine.loop.tokens[0, 0]) > least or least == 20
        assert not {free[0], free[1]} & set(engine.loop.tokens[0, 0][:least])
        assert_exact(engine.loop, (free[0],))


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.promise("D11")
@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (request(1, ()), "prompt"),
        (request(1, (13,)), "prompt"),
        (request(1, (-1,)), "prompt"),
        (request(1, tuple(range(5)), max_tokens=0), "max_tokens"),
        (request(1, (1,) * 10, max_tokens=7), "max_tokens"),
        (request(1, max_tokens=3, min_tokens=4), "min_tokens"),
        (request(1, stop=(13,)), "stop_token_ids"),
        (request(1, n=4), "n"),
        (request(1, n=0), "n"),
        (request(0), "id"),
        (Request(1, (1,), SamplingParams(max_tokens=1, logit_bias=((13, 1.0),))), "logit_bias"),
        (Request(1, (1,), SamplingParams(max_tokens=1, logit_bias=((-1, 1.0),))), "logit_bias"),
        (request(1, allowed_token_ids=(2, 13)), "allowed_token_ids"),
        (request(1, allowed_token_ids=(2, 3), stop=(3, 2, 1), min_tokens=1), "allowed_token_ids"),
        (request(1, xtc_kept=(-1,)), "xtc_kept"),
    ],
)
def test_a_request_that_could_never_run_is_refused(bad: Request, param: str) -> None:
    engine = make_engine(num_blocks=5, block_size=4, max_num_seqs=3)
    engine.loop.add(request(0))
    with pytest.raises(InvalidRequest) as e:
        engine.scheduler.add(bad)
    assert e.value.param == param
    engine.loop.run()
    engine.loop.assert_idle()
    assert_exact(engine.loop)


def test_the_longest_request_that_fits_runs() -> None:
    engine = make_engine(num_blocks=5, block_size=4, max_num_seqs=3)
    engine.loop.add(request(0, (1,) * 10, max_tokens=6))
    engine.loop.run()
    assert_exact(engine.loop)
    engine.loop.assert_idle()


def test_an_adapter_without_slots_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        make_engine(max_loras=0).scheduler.add(request(0, adapter="a"))


# --- evictions ---------------------------------------------------------------------------------------------------


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    """What is left of it is then found by whoever asks for it again; a rest without its beginning helps nobody."""
    engine = make_engine(num_blocks=20, max_num_seqs=2)
    prompt = tuple(i * i % 11 for i in range(50))
    for number, tokens in enumerate((prompt, tuple(i % 7 for i in range(24)), prompt)):
        before = engine.scheduler.prefix_counts.hits
        engine.loop.add(Request(number, tokens, SamplingParams(max_tokens=2, seed=1)))
        engine.loop.run()
    assert engine.scheduler.prefix_counts.evictions > 0
    assert engine.scheduler.prefix_counts.hits - before >= 24
