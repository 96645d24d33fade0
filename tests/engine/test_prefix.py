"""Prompts that begin alike, on the reference runner: computed once, never shared across what may not be shared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from mlx_tandem.engine import prefix_leaders
from mlx_tandem.types import AdapterRef, Request, SamplingParams
from tests.engine.workloads import Engine, assert_exact, expected, make_engine

PROMPT = tuple(i * i % 13 for i in range(50))


@pytest.fixture(autouse=True)
def _wait_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_leaders, "WORTH_WAITING", 8)


def ask(
    number: int,
    prompt: tuple[int, ...] = PROMPT,
    *,
    adapter: AdapterRef | None = None,
    max_tokens: int = 6,
    n: int = 1,
    follow: bool = False,
    stop: tuple[int, ...] = (),
    **more: bool,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=number, stop_token_ids=stop)
    return Request(number, prompt, params, adapter, n, follow=follow, **more)


def serve(engine: Engine, *requests: Request) -> None:
    for request in requests:
        engine.loop.add(request)
    engine.loop.run()
    engine.loop.assert_idle()
    assert_exact(engine.loop)


def steps_until(engine: Engine, there: Callable[[], bool]) -> None:
    while not there():
        assert engine.loop.step()


@pytest.mark.parametrize("depth", [0, 1])
def test_the_turns_of_a_conversation_are_computed_once(depth: int) -> None:
    """Each prompt is the one before with its answer and something new behind it."""
    engine = make_engine(num_blocks=400, block_size=16, depth=depth)
    prompt, asked, cached = PROMPT, 0, 0
    for turn in range(20):
        serve(engine, ask(turn, prompt, max_tokens=30))
        if turn:
            asked += len(prompt)
            cached += engine.loop.cached[turn]
        prompt += (*engine.loop.tokens[turn, 0], *PROMPT[turn : turn + 9])
    assert cached >= 0.95 * asked, f"{cached} of {asked}"


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("length", [16, 17, 40, 48, 49])
def test_a_group_of_sixteen_reads_its_prompt_once(depth: int, length: int) -> None:
    """Requests of their own that come at the same time; at most half a block is computed again, and the last token."""
    engine = make_engine(num_blocks=400, block_size=4, max_num_seqs=16, depth=depth)
    serve(engine, *(ask(i, PROMPT[:length], max_tokens=2) for i in range(16)))
    decoded = 16 * (2 - 1)
    assert engine.runner.positions <= length + 15 * 3 + decoded
    assert sum(engine.loop.cached.values()) == 16 * length + decoded - engine.runner.positions


def test_what_is_not_worth_it_is_not_waited_for() -> None:
    """One block in common with a long prompt."""
    engine = make_engine(num_blocks=400, block_size=4, depth=0)
    engine.loop.add(ask(0, PROMPT * 4))
    engine.loop.add(ask(1, (*PROMPT[:12], 5, 5, 5)))
    engine.loop.step()
    assert engine.scheduler.queue.num_running == 2


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("end", ["cancel", "launch", "half", "wait", "nan", "preempt"])
def test_whoever_waits_for_another_s_prompt_goes_on_without_it(
    depth: int, end: Literal["cancel", "launch", "half", "wait", "nan", "preempt"]
) -> None:
    """In each step of the reading the leader is lost; those that waited say what they say alone."""
    for moment in range(1, 6):
        fail = {moment: end} if end in ("launch", "half", "wait") else {}
        engine = make_engine(
            num_blocks=100, block_size=4, depth=depth, fail=fail, nan={moment: 0} if end == "nan" else {}
        )
        scheduler, loop = engine.scheduler, engine.loop
        scheduler.prefill.cost.fit([(length, 0, float(length)) for length in (8, 64)], [(1, 1.0)])
        object.__setattr__(scheduler, "_config", type(scheduler._config)(max_num_seqs=8, max_chunk_tokens=16))
        for i in range(3):
            loop.add(ask(i))
        loop.step()
        assert scheduler.queue.num_running == 1, "two wait"
        while loop.steps < moment:
            loop.step()
        if end == "cancel":
            loop.cancel(0)
        elif end == "preempt" and scheduler.queue.running:
            scheduler.queue.preempt(scheduler.queue.running[0])
        loop.run()
        loop.assert_idle()
        assert_exact(loop)
        assert {(1, 0), (2, 0)} <= loop.finished.keys() or end not in ("cancel", "preempt")


@pytest.mark.promise("I8")
def test_a_new_version_under_an_old_name_finds_nothing_of_the_old() -> None:
    """Reloaded or trained: the digest decides; and the old version still finds what is its own."""
    engine = make_engine(num_blocks=100)
    old, new = AdapterRef("a", 1, "old"), AdapterRef("a", 2, "new")
    serve(engine, ask(0, adapter=old), ask(1))
    for number, adapter, hits in ((2, new, False), (3, old, True), (4, None, True), (5, new, True)):
        serve(engine, ask(number, adapter=adapter))
        assert (engine.loop.cached[number] > 0) == hits
    serve(engine, ask(6, adapter=AdapterRef("b", 1, "old")))
    assert engine.loop.cached[6] > 0, "the same content under another name"


CALL = (7, 11)
"""What invokes the adapters of the next tests; PROMPT has it nowhere."""


def invoked(name: str, call: tuple[int, ...] = CALL) -> AdapterRef:
    return AdapterRef(name, 1, name, call)


@pytest.mark.parametrize("first", ["base", "one", "other"])
def test_what_precedes_an_invocation_is_shared_by_the_base_and_all_adapters_that_are_invoked(first: str) -> None:
    """The first computes it for all. The block with both sorts of positions and those after it are its own."""
    adapters = {"base": None, "one": invoked("one"), "other": invoked("other")}
    prompt = (*PROMPT[:22], *CALL, *PROMPT[22:40])
    engine = make_engine(num_blocks=100, block_size=4)
    order = [first, *(name for name in adapters if name != first)]
    for number, name in enumerate(order):
        serve(engine, ask(number, prompt, adapter=adapters[name]))
    assert [engine.loop.cached[i] for i in range(3)] == [0, 20, 20]
    for number, name in enumerate(order, 3):  # a later turn, in which nothing is invoked again
        serve(engine, ask(number, (*prompt, 1, 2, 3), adapter=adapters[name]))
    assert all(engine.loop.cached[i] >= 40 for i in range(3, 6))
    answers = [engine.loop.tokens[i, 0] for i in range(3)]
    assert answers[0] != answers[1] != answers[2]


def test_where_an_adapter_begins_within_a_block_may_follow_from_tokens_after_it() -> None:
    """The same block under the same adapter, which begins in it early or late."""
    engine = make_engine(num_blocks=100, block_size=8)
    adapter = invoked("a", (7, 11))
    begun = (*PROMPT[:8], 1, 7, 11, 2, 3, 4, 5, 7)
    serve(engine, ask(0, (*begun, 5, 5, 5), adapter=adapter))
    serve(engine, ask(1, (*begun, 11, 5, 5), adapter=adapter))
    assert engine.loop.cached[1] == 8
    serve(engine, ask(2, (*begun, 11, 5, 6), adapter=adapter))
    assert engine.loop.cached[2] >= 16


def test_an_adapter_that_is_invoked_again_leaves_what_it_computed_before() -> None:
    """In the next turn of a conversation, the base computes the answer that the adapter has given."""
    engine = make_engine(num_blocks=100, block_size=4)
    prompt = (*PROMPT[:20], *CALL, 1, 2)
    serve(engine, ask(0, prompt, adapter=invoked("a")))
    serve(engine, ask(1, (*prompt, *engine.loop.tokens[0, 0], *CALL, 1, 2), adapter=invoked("a")))
    assert engine.loop.cached[1] == 20


def test_the_base_answers_for_an_adapter_that_is_not_invoked() -> None:
    """Its blocks are the base's, too."""
    engine = make_engine(num_blocks=100, block_size=4)
    serve(engine, ask(0, adapter=invoked("a")))
    serve(engine, Request(1, PROMPT, engine.loop.requests[0].params))
    assert engine.loop.tokens[0, 0] == engine.loop.tokens[1, 0]
    assert engine.loop.cached[1] == 48


@pytest.mark.promise("DET-6")
@pytest.mark.parametrize("moves", ["while it runs", "while it waits"])
def test_what_two_versions_have_computed_is_for_nobody(moves: str) -> None:
    engine = make_engine(num_blocks=100, depth=0)
    loop, scheduler = engine.loop, engine.scheduler
    old, new = AdapterRef("a", 1, "old"), AdapterRef("a", 2, "new")
    loop.add(ask(0, adapter=old, max_tokens=12, follow=True))
    steps_until(engine, lambda: len(loop.tokens[0, 0]) == 3)
    if moves == "while it waits":
        scheduler.queue.preempt(scheduler.queue.running[0])
    loop.follow(new)
    loop.run()
    said = (*PROMPT, *loop.tokens[0, 0])
    serve(engine, ask(1, (*said, 1, 2), adapter=old))
    assert loop.cached[1] <= len(PROMPT) + 3
    serve(engine, ask(2, adapter=new))
    assert (loop.cached[2] == 0) == (moves == "while it runs")
    serve(engine, ask(3, (*said, 1, 2), adapter=new))  # what is there of it now is behind what was just computed


@pytest.mark.promise("FLT-04")
def test_what_is_not_finite_is_not_found() -> None:
    """The answer ends while its next row is on the device, which is not finite: its blocks are for nobody."""
    answer = expected(ask(0, max_tokens=20), 0)
    at = next(i for i in range(2, 20) if answer[i] not in answer[:i] and (len(PROMPT) + i) % 4 == 3)
    engine = make_engine(num_blocks=100, depth=1, nan={at + 1: 0})
    serve(engine, ask(0, max_tokens=20, stop=(answer[at],)))
    assert engine.loop.finished == {(0, 0): "stop"}
    assert engine.runner.launches == at + 2
    serve(engine, ask(1, (*PROMPT, *answer[:at], 1, 1)))
    assert engine.loop.finished[1, 0] == "length"
    assert engine.loop.cached[1] == 0
    assert not engine.runner.spoiled


def test_prompts_that_are_scored_are_computed_whole_and_found_by_others() -> None:
    engine = make_engine(num_blocks=100)
    params = SamplingParams(max_tokens=3, prompt_logprobs=0)
    for i in range(2):
        serve(engine, Request(i, PROMPT, params))
        assert engine.loop.cached[i] == 0
    serve(engine, ask(2))
    assert engine.loop.cached[2] == len(PROMPT) - 2  # 49 are there, 48 as whole blocks


def test_without_the_cache_everything_is_computed() -> None:
    engine = make_engine(num_blocks=100, prefixes=False)
    serve(engine, ask(0), ask(1))
    serve(engine, ask(2))
    assert set(engine.loop.cached.values()) == {0}
    assert engine.scheduler.prefix_counts.queries == 0


def test_hits_and_queries_are_counted_once_a_request() -> None:
    engine = make_engine(num_blocks=100)
    serve(engine, ask(0, n=3))
    serve(engine, ask(1, n=2))
    counts = engine.scheduler.prefix_counts
    assert counts.queries == 2 * len(PROMPT)
    assert counts.hits == engine.loop.cached[1] > 0
    assert counts.blocks > 0
