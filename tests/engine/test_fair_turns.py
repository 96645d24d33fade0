"""Clients take turns where their requests wait for a seat."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mlx_tandem.engine.fair_turns import ROOM, FairTurns
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
    """Those of a client and a priority keep their order, and none is ahead of another by more than a request's choices
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
            begun[r.client] += r.n
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
