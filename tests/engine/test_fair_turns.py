"""Clients take turns where their requests wait for a seat."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.engine import fair_turns
from mlx_tandem.engine.fair_turns import ROOM, FairTurns
from mlx_tandem.types import Request
from tests.engine.harness import Loop
from tests.engine.workloads import Engine, assert_exact, make_engine, request


def one_at_a_time() -> Engine:
    return make_engine(max_num_seqs=4, depth=0)


@pytest.mark.promise("F12")
def test_one_request_does_not_wait_for_the_five_hundred_of_another_client() -> None:
    engine = one_at_a_time()
    for number in range(500):
        engine.scheduler.add(structs.replace(request(number, max_tokens=1), client=7))
    while engine.scheduler.queue.num_running < engine.max_num_seqs:
        engine.scheduler.queue.begin_waiting(())
    for number in (500, 501, 502):
        engine.scheduler.add(structs.replace(request(number, max_tokens=1), client=8))
    found = [s.request.id for s in engine.scheduler.queue.waiting]
    assert found[:7] == [500, 4, 501, 5, 502, 6, 7], "nor do those of the first wait for all of the second's"


def test_a_choice_has_the_turn_of_the_first_one_that_was_cancelled() -> None:
    scheduler = one_at_a_time().scheduler
    for number in range(3):
        scheduler.add(structs.replace(request(number, n=2), client=1))
    scheduler.cancel(2, 0)
    scheduler.add(structs.replace(request(3), client=2))
    assert [s.request.id for s in scheduler.queue.waiting] == [0, 3, 1, 2]


CLIENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=24)


@pytest.mark.promise("F12")
@settings(max_examples=60)
@given(CLIENTS)
def test_clients_take_turns(asked: list[tuple[int, int, int]]) -> None:
    """Those of a client and a priority keep their order, and none is ahead of another by more than a request's tokens
    while both wait.
    """
    numbered = [(number, *each) for number, each in enumerate(asked)]
    engine = one_at_a_time()
    for number, client, priority, choices in numbered:
        made = request(number, n=choices, max_tokens=1, priority=priority)
        engine.scheduler.add(structs.replace(made, client=client))
    found = [s.request for s in engine.scheduler.queue.waiting]
    assert [r.priority for r in found] == sorted(r.priority for r in found)
    for priority in (0, 1):
        own = [r for r in found if r.priority == priority]
        for client in range(4):
            ids = [r.id for r in own if r.client == client]
            assert ids == sorted(ids)
        left, begun = Counter(r.client for r in own), Counter[int]()
        for r in own:
            assert begun[r.client] <= min(begun[c] for c in left if left[c]), "another client's turn was before"
            begun[r.client] += len(r.prompt) + r.n * r.params.max_tokens
            left[r.client] -= 1


@given(st.permutations(list(range(8))))
def test_a_client_alone_has_the_order_in_which_its_requests_came(numbers: list[int]) -> None:
    """However late they are added."""
    engine = one_at_a_time()
    for number in numbers:
        engine.scheduler.add(request(number))
    assert [s.request.id for s in engine.scheduler.queue.waiting] == sorted(numbers)


def test_clients_that_have_no_turn_to_come_are_forgotten() -> None:
    turns = FairTurns()
    for client in range(100 * ROOM):
        turn = turns.take((False, client % 50), client, 1)
        turns.begun((False, client % 50), turn + 1)
    assert turns._clients <= ROOM and len(turns._classes) <= ROOM
    for client in range(4 * ROOM):
        turns.take((False, 0), client, 1)
    assert turns._clients >= 4 * ROOM, "those who wait are not forgotten"


def test_clients_who_ask_once_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for nothing begins at once, so no turn is ever past. One with much to wait for is not forgotten."""
    monkeypatch.setattr(fair_turns, "MOST", 100)
    turns = FairTurns()
    for _ in range(3):
        turns.take((False, 0), -1, 1000)
    for client in range(5000):
        priority = (False, client % 7)
        turns.begun(priority, turns.take(priority, client, 5))
    assert turns._clients <= 200 and len(turns._answers) <= 400
    assert turns.take((False, 0), -1, 1000) == 3000


def test_requests_that_were_cancelled_took_no_turn() -> None:
    engine = one_at_a_time()
    scheduler = engine.scheduler
    for number in range(100):
        scheduler.add(structs.replace(request(number), client=1))
    for number in range(99, -1, -1):
        scheduler.cancel(number)
    for number in (100, 101, 102):
        scheduler.add(structs.replace(request(number), client=2))
    scheduler.add(structs.replace(request(103), client=1))
    assert [s.request.id for s in scheduler.queue.waiting] == [100, 101, 103, 102]


def test_a_client_that_always_has_one_request_waiting_does_not_take_all_turns() -> None:
    turns = FairTurns()
    many = [turns.take((False, 0), 1, 1) for _ in range(3)]
    assert many == [0, 1, 2]
    begun = []
    for _ in range(3):
        one = turns.take((False, 0), 2, 1)
        first = min([(turn, 1) for turn in many] + [(one, 2)])
        begun.append(first)
        turns.begun((False, 0), first[0])
        if first[1] == 1:
            many.remove(first[0])
    assert [client for _, client in begun].count(1) >= 1


def test_a_client_that_comes_back_has_no_turns_that_are_past() -> None:
    """Else all of its requests would be ahead of those who have asked meanwhile."""
    turns, priority = FairTurns(), (False, 0)
    turns.begun(priority, turns.take(priority, 1, 1))
    for _ in range(50):
        turns.begun(priority, turns.take(priority, 2, 1))
    waiting = turns.take(priority, 2, 1)
    assert [turns.take(priority, 1, 1) for _ in range(3)] == [waiting - 1, waiting, waiting + 1]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 3), st.integers(0, 1)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(EVENTS)
def test_every_sequence_is_exact_whoever_takes_turns(events: list[tuple[str, int, int, int]]) -> None:
    """With few blocks, so that sequences give theirs back, and with cancels."""
    engine = make_engine(num_blocks=12, max_num_seqs=3)
    loop = engine.loop
    for what, number, *more in events:
        if what == "add":
            choices, priority = more
            made = request(len(loop.requests), (number, 2, 3, 4, 5), n=choices, priority=priority, seed=number)
            loop.add(structs.replace(made, client=number))
        elif what == "cancel" and number in loop.requests:
            engine.scheduler.cancel(number)
        else:
            for _ in range(number):
                loop.step()
    loop.run()
    assert_exact(loop)
    assert not engine.scheduler.requests


# -- a tenant with one request beside one with a thousand --------------------------------------------------------------

MANY = 1000


def steps_until_end(loop: Loop, number: int) -> int:
    """Turn the loop until a request has ended; return how many steps that took."""
    before = loop.steps
    while (number, 0) not in loop.finished:
        loop.step()
    return loop.steps - before


def engine_for(seats: int, blocks: int, chunk: int) -> Engine:
    return make_engine(max_num_seqs=seats, num_blocks=blocks, max_chunk_tokens=chunk)


@pytest.mark.promise("F12")
@pytest.mark.timeout(120)
@settings(max_examples=3, deadline=None)
@given(
    seats=st.integers(2, 6),
    prompt=st.integers(1, 20),
    answer=st.integers(4, 12),
    theirs=st.tuples(st.integers(1, 60), st.integers(1, 200)),
    begun=st.integers(0, 80),
)
@example(seats=3, prompt=1, answer=4, theirs=(1, 200), begun=80)  # their answers are long
@example(seats=6, prompt=2, answer=4, theirs=(60, 4), begun=2)  # they are reading long prompts
def test_one_request_waits_no_longer_than_twice_its_time_alone(
    seats: int, prompt: int, answer: int, theirs: tuple[int, int], begun: int
) -> None:
    """In steps, beside a client that has asked a thousand times, whatever their lengths and however far it has got; and
    again and again, since whoever asks one question after another has one request open. So do two, if there are seats.
    """

    def one(number: int, client: int) -> Request:
        own = tuple(1 + (number + i) % 11 for i in range(prompt))
        return structs.replace(request(number, own, max_tokens=answer), client=client)

    alone = engine_for(seats, 64 * seats, 16)
    alone.loop.add(one(MANY, 2))
    uncontended = steps_until_end(alone.loop, MANY)
    loop = engine_for(seats, 64 * seats, 16).loop
    length, most = theirs
    for number in range(MANY):
        loop.add(structs.replace(request(number, (number % 11,) * length, max_tokens=most), client=1))
    for _ in range(begun):
        loop.step()
    for number in range(MANY, MANY + 6, 2):
        asked = [one(number + i, 2 + i) for i in range(min(2, seats - 1))]
        for other in asked:
            loop.add(other)
            loop.step()
        steps = len(asked) + sum(steps_until_end(loop, other.id) for other in asked)
        assert steps <= 2 * uncontended
    assert_exact(loop)


def test_a_third_client_does_not_wait_behind_whom_the_second_displaced() -> None:
    """Each of three clients has a seat then, and a fourth waits, since nobody has one to spare."""
    loop = engine_for(3, 256, 16).loop
    for number in range(10):
        loop.add(structs.replace(request(number, max_tokens=100), client=1))
    for _ in range(5):
        loop.step()
    for client in (2, 3, 4):
        loop.add(structs.replace(request(10 * client, max_tokens=20), client=client))
        for _ in range(3):
            loop.step()
    running = loop.scheduler.queue.running
    assert sorted(s.request.client for s in running) == [1, 2, 3]
    assert running[0].request.id == 0, "who came first stays"
    assert steps_until_end(loop, 40) <= 40, "it is the next"
    loop.run()
    assert_exact(loop)


def test_nobody_is_displaced_for_who_would_need_more_than_is_left() -> None:
    loop = engine_for(4, 256, 16).loop
    for number in range(10):
        loop.add(structs.replace(request(number, max_tokens=100), client=1))
    for _ in range(5):
        loop.step()
    loop.add(structs.replace(request(20, n=3), client=2))
    loop.step()
    assert [s.request.id for s in loop.scheduler.queue.running] == [0, 1, 2, 3]
    loop.run()
    assert_exact(loop)


def test_more_important_requests_are_not_displaced() -> None:
    loop = engine_for(3, 256, 16).loop
    for number in range(3):
        loop.add(structs.replace(request(number, max_tokens=30, priority=number % 2), client=1))
    loop.step()
    loop.add(structs.replace(request(10, priority=1), client=2))
    loop.step()
    assert sorted(s.request.id for s in loop.scheduler.queue.running) == [0, 2, 10]
    loop.run()
    for number in range(20, 23):
        loop.add(structs.replace(request(number, max_tokens=30), client=1))
    loop.step()
    loop.add(structs.replace(request(30, priority=2), client=3))
    loop.step()
    assert sorted(s.request.id for s in loop.scheduler.queue.running) == [20, 21, 22]
    loop.run()
    assert_exact(loop)


def test_turns_go_by_tokens() -> None:
    """A client with long requests has fewer of them than one with short ones, by their tokens and not by max_tokens."""
    engine = make_engine(max_num_seqs=1, depth=0, eos=())
    for number in range(40):
        client = 1 + number % 2
        prompt = (1, 2, 3, 4, 5) if client == 1 else (6,) * 20
        engine.loop.add(structs.replace(request(number, prompt, max_tokens=5), client=client))
    found = [s.request.client for s in engine.scheduler.queue.waiting]
    assert found[:20].count(1) in (14, 15)  # 10 tokens against 25

    engine = make_engine(max_num_seqs=1, depth=0, eos=())
    for number in range(4):
        made = request(number, (1 + number,), max_tokens=1 if number % 2 else 200, stop=tuple(range(13)))
        engine.loop.add(structs.replace(made, client=1 + number % 2))
    engine.loop.run()
    for number in range(10, 30):
        made = request(number, (1,), max_tokens=1 if number % 2 else 200)
        engine.loop.add(structs.replace(made, client=1 + number % 2))
    found = [s.request.client for s in engine.scheduler.queue.waiting]
    assert abs(found[:10].count(1) - found[:10].count(2)) <= 2, "answers to both had one token"


def test_a_client_that_has_none_running_gets_blocks_of_the_one_with_most() -> None:
    loop = make_engine(max_num_seqs=8, num_blocks=13, depth=0).loop
    for number in range(8):
        loop.add(structs.replace(request(number, (1 + number,) * 8, max_tokens=30), client=1))
    for _ in range(12):
        loop.step()
    assert loop.pool.free_blocks < 3 and len(loop.scheduler.queue.running) > 1
    loop.add(structs.replace(request(20, (9,) * 12, max_tokens=3), client=2))
    assert steps_until_end(loop, 20) <= 6
    loop.step()
    before = sum(loop.preempted.values())
    loop.add(structs.replace(request(21, (10,) * 40, max_tokens=3), client=3))
    loop.step()
    assert sum(loop.preempted.values()) == before, "the other would have less than this one"
    loop.run()
    assert_exact(loop)


def test_background_sequences_go_first_and_are_not_lost() -> None:
    """While clients that have none running are put first."""
    loop = engine_for(4, 64, 16).loop
    for number in range(6):
        loop.add(structs.replace(request(number, max_tokens=30), client=number % 2, background=number > 1))
    for _ in range(3):
        loop.step()
    for number in range(10, 14):
        loop.add(structs.replace(request(number, max_tokens=9), client=number))
        loop.step()
    assert [s.request.background for s in loop.scheduler.queue.running] == [False] * 4
    assert sum(s.request.background for s in loop.scheduler.queue.waiting) == 4
    loop.run()
    assert_exact(loop)
