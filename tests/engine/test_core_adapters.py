"""The engine's loop with adapters on the reference runner: reading, serving, unloading, and leaving memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import messages as m
from mlx_tandem.errors import ModelError
from mlx_tandem.types import AdapterSource
from tests.engine.front import Front, adapter, request
from tests.engine.workloads import expected
from tests.waiting import until


def test_requests_whose_adapter_is_being_read_are_deferred(front: Front) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def read(path: Path) -> AdapterWeights:
        reading.set()
        assert go_on.wait(20)
        return adapter(path.name)

    front.read = read
    digest = adapter("late").info.digest
    front.send(m.KnowAdapter(adapter("late").info, AdapterSource("/late")))
    front.send(m.Submit(request(0, n=2, max_tokens=30)), m.Submit(request(1, digest, n=2)))
    front.turn(2)
    assert reading.wait(20)
    front.turn()
    load = front.got(m.Occupancy)[-1]
    assert (load.running, load.waiting, load.deferred) == (2, 2, 2)
    go_on.set()
    front.finish()
    assert front.finished() == {0, 1}
    load = front.got(m.Occupancy)[-1]
    assert (load.running, load.waiting, load.deferred) == (0, 0, 0)


def test_adapters_are_loaded_and_served_in_one_batch(front: Front) -> None:
    front.load("a", "b")
    assert {x.info.digest for x in front.got(m.AdapterLoaded)} == {"a", "b"}
    requests = [request(0, "a"), request(1, "b"), request(2), request(3, "a")]
    front.send(*map(m.Submit, requests))
    front.finish()
    for r in requests:
        assert front.tokens(r.id) == expected(r, 0)
    assert front.core.stats().resident_adapters == ("a", "b")
    assert 0 < front.core.stats().lora_rows < front.core.stats().rows
    front.assert_nothing_is_held()


def test_a_folder_that_is_refused_says_why(front: Front) -> None:
    def refuse(path: Path) -> AdapterWeights:
        raise ModelError("use_dora is not supported", param="use_dora")

    front.read = refuse
    front.load("a")
    (failed,) = front.got(m.CallFailed)
    assert (failed.call, failed.param, failed.message) == (100, "use_dora", "use_dora is not supported")
    assert not front.weights


def test_an_unforeseen_error_in_reading_is_an_answer_too(front: Front) -> None:
    def stumble(path: Path) -> AdapterWeights:
        raise ZeroDivisionError

    front.read = stumble
    front.load("a")
    (failed,) = front.got(m.CallFailed)
    assert failed.call == 100
    front.send(m.Submit(request(0)))
    front.finish()
    assert front.tokens(0) == expected(request(0), 0)


def test_loading_does_not_hold_steps_up(front: Front) -> None:
    """The folder is not read to its end until a whole request has been served."""
    served = threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert served.wait(60)
        return adapter(path.name)

    front.read = slow
    front.send(m.LoadAdapter(1, AdapterSource("/adapters/a")), m.Submit(request(0)))
    while 0 not in front.finished():
        front.turn()
    assert not front.got(m.AdapterLoaded)
    served.set()
    front.finish()
    assert [x.call for x in front.got(m.AdapterLoaded)] == [1]


def test_an_adapter_that_is_unloaded_serves_whom_it_was_promised_to(front: Front) -> None:
    front.load("a")
    running, queued = request(0, "a", max_tokens=12), request(1, "a", n=4)
    front.send(m.Submit(running))
    front.turn(3)
    front.send(m.Submit(queued), m.UnloadAdapter(7, "a"))
    front.turn()
    assert [x.call for x in front.got(m.CallDone)] == [7]
    assert "a" in front.weights
    front.finish()
    assert front.tokens(0) == expected(running, 0)
    assert [front.tokens(1, i) for i in range(4)] == [expected(queued, i) for i in range(4)]
    assert not front.weights
    assert front.slots.residents() == ()
    front.send(m.Submit(request(2, "a")))
    front.finish()
    assert [f.code for f in front.got(m.Failed)] == ["model_not_found"]


def test_a_cancelled_request_lets_go_of_its_adapter(front: Front) -> None:
    front.load("a")
    front.send(m.Submit(request(0, "a", max_tokens=40)))
    front.turn(2)
    front.send(m.UnloadAdapter(7, "a"))
    front.turn()
    assert "a" in front.weights
    front.send(m.Cancel(0))
    front.turn()
    assert not front.weights
    front.finish()
    front.assert_nothing_is_held()


def test_an_adapter_that_comes_back_while_it_goes_stays(front: Front) -> None:
    front.load("a")
    front.send(m.Submit(request(0, "a", max_tokens=20)))
    front.turn(2)
    front.send(m.UnloadAdapter(7, "a"), m.LoadAdapter(8, AdapterSource("/adapters/a")))
    front.finish()
    assert list(front.weights) == ["a"]
    front.send(m.Submit(request(1, "a")))
    front.finish()
    assert front.tokens(1) == expected(request(1, "a"), 0)


def test_unloading_what_nobody_knows_is_done(front: Front) -> None:
    front.send(m.UnloadAdapter(7, "nobody"))
    front.turn()
    assert [x.call for x in front.got(m.CallDone)] == [7]


@pytest.mark.promise("FLT-06")
def test_an_unload_beside_a_lost_upload_harms_nobody(make_front: Callable[..., Front]) -> None:
    """The step that would upload `a` fails while `a` is being unloaded: nobody may ask for its upload again."""
    front = make_front(fail={0: "launch"})
    front.load("a")
    front.send(m.Submit(request(0, "a")), m.UnloadAdapter(7, "a"))
    front.turn()
    assert [f.request for f in front.got(m.Failed)] == [0]
    front.send(m.Submit(request(1)))
    front.finish()
    assert front.tokens(1) == expected(request(1), 0)
    assert front.core.stats().step_failures == 1


def test_an_adapter_that_was_dropped_is_read_again(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    front.load("a", "b", "c")
    assert list(front.weights) == ["c"]
    asked = [request(i, name, max_tokens=4) for i, name in enumerate("abcab")]
    front.send(*map(m.Submit, asked))
    front.finish()
    assert [front.tokens(r.id) for r in asked] == [expected(r, 0) for r in asked]
    assert len(front.weights) == 1
    assert front.core.stats().adapter_evictions > 2
    front.assert_nothing_is_held()


def test_what_leaves_memory_keeps_its_slot_until_another_takes_it(make_front: Callable[..., Front]) -> None:
    """It need not be written again when it comes back."""
    front = make_front(most_loaded=1)
    front.load("a")
    front.send(m.Submit(request(0, "a", max_tokens=20)))
    front.turn(2)
    front.send(m.LoadAdapter(1, AdapterSource("/adapters/b")))
    while "b" not in front.weights:
        front.turn()
    front.send(m.Submit(request(1, "b", max_tokens=40)))
    front.finish()
    assert list(front.weights) == ["b"] and front.slots.residents() == ("a", "b")
    uploads: list[tuple[int, str]] = []
    launch = front.runner.launch
    front.runner.launch = lambda plan: (uploads.extend(plan.uploads), launch(plan))[1]  # type: ignore[method-assign]
    front.send(m.Submit(request(2, "a")))
    front.finish()
    assert front.tokens(2) == expected(request(2, "a"), 0) and not uploads
    front.send(m.UnloadAdapter(7, "b"))
    front.finish()
    assert front.slots.residents() == ("a",), "what is unloaded does not"


def test_memory_never_holds_more_than_it_may(make_front: Callable[..., Front]) -> None:
    """64 bytes an adapter: two of them, whatever is asked for at once."""
    front = make_front(most_bytes=128)
    names = [f"n{i}" for i in range(12)]
    front.load(*names)
    asked = [request(i, names[i % 12], max_tokens=3) for i in range(36)]
    front.send(*map(m.Submit, asked))
    while len(front.finished()) < len(asked):
        front.turn()
        assert len(front.weights) <= 2
    assert all(front.tokens(r.id) == expected(r, 0) for r in asked)
    front.finish()
    front.assert_nothing_is_held()


def test_a_stream_of_others_does_not_keep_one_out(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    front.load("b", "a")
    waiting = request(0, "b", max_tokens=2)
    number = 1
    front.send(m.Submit(request(number, "a", max_tokens=30)), m.Submit(waiting))
    while 0 not in front.finished():
        if not front.core._adapters.is_loading:  # how many would come meanwhile depends on the machine
            number += 1
            front.send(m.Submit(request(number, "a", max_tokens=8)))
        front.turn()
        assert number < 2000
    assert front.tokens(0) == expected(waiting, 0)


def test_a_request_keeps_its_place_while_its_adapter_is_read(make_front: Callable[..., Front]) -> None:
    """It begins before those that came later and still wait for a seat."""
    front = make_front(most_loaded=1)
    front.load("b", "a")  # "b" has to make room
    read, may_read = front.read, threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert may_read.wait(60)
        return read(path)

    front.read = slow
    front.send(m.Submit(request(0, "b")), *(m.Submit(request(n, max_tokens=12)) for n in range(1, 13)))
    front.turn(3)
    assert front.scheduler.queue.num_running == 4
    may_read.set()
    until(lambda: front.core._adapters._loader._done.qsize())
    front.finish()
    order = list(dict.fromkeys(d.request for d in front.deltas if d.tokens))
    assert sorted(order) == list(range(13))
    assert order.index(0) <= 8  # of the first four, or of those that follow them


def test_an_adapter_that_changed_on_disk_fails_its_requests_alone(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    front.load("a", "b")
    front.read = lambda path: adapter("other")
    front.send(m.Submit(request(0, "a")), m.Submit(request(1, "a")), m.Submit(request(2, "b")))
    front.finish()
    assert [(f.request, f.code) for f in front.got(m.Failed)] == [(0, "adapter_changed"), (1, "adapter_changed")]
    assert front.tokens(2) == expected(request(2, "b"), 0)
    front.assert_nothing_is_held()


def test_content_that_several_folders_have_is_found_where_it_still_is(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    content = {"x": "a", "y": "a", "z": "a", "b": "b"}
    front.read = lambda path: adapter(content[path.name])
    front.load("x", "y", "z", "b")
    content |= {"z": "changed", "x": "changed"}
    front.send(m.Submit(request(0, "a")))
    front.finish()
    assert front.tokens(0) == expected(request(0, "a"), 0)
    front.send(m.Submit(request(1, "b")))
    front.finish()
    content["y"] = "changed"
    front.send(m.Submit(request(2, "a")))
    front.finish()
    assert [(f.request, f.code) for f in front.got(m.Failed)] == [(2, "adapter_changed")]
    front.assert_nothing_is_held()


def test_a_version_of_an_earlier_engine_is_read_when_it_is_used(front: Front) -> None:
    front.send(m.KnowAdapter(adapter("a").info, AdapterSource("/adapters/a")))
    front.turn()
    assert not front.weights
    front.send(m.Submit(request(0, "a")), m.Submit(request(1, "a")), m.Cancel(1))
    front.finish()
    assert front.tokens(0) == expected(request(0, "a"), 0)
    assert not front.tokens(1)
    front.assert_nothing_is_held()


def test_an_unload_beside_its_own_reading_harms_nobody(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    front.load("a", "b", "c")
    held = threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert held.wait(60)
        return adapter(path.name)

    front.read = slow
    front.send(m.Submit(request(0, "a")))
    front.turn()
    front.send(m.UnloadAdapter(7, "a"), m.Submit(request(1, "b")))
    front.turn(3)
    held.set()
    front.finish()
    assert [(f.request, f.code) for f in front.got(m.Failed)] == [(0, "adapter_changed")]
    assert front.tokens(1) == expected(request(1, "b"), 0)
    front.assert_nothing_is_held()


def test_who_waits_for_a_slot_is_overtaken_by_requests_whatever_choices_they_have(
    make_front: Callable[..., Front],
) -> None:
    front = make_front(max_loras=1)
    front.load("a", "b")
    front.send(m.Submit(request(0, "a", max_tokens=30)))
    front.turn(2)
    front.send(m.Submit(request(1, "b")), m.Submit(request(2, n=3, max_tokens=2)))
    while 2 not in front.finished():
        front.turn()
    (waiting,) = front.scheduler.queue.waiting
    assert (waiting.request.id, waiting.overtaken) == (1, 1)
    front.finish()
    assert front.finished() == {0, 1, 2}


def test_pins_do_not_stop_the_others(make_front: Callable[..., Front]) -> None:
    front = make_front(most_loaded=1)
    front.send(m.LoadAdapter(1, AdapterSource("/adapters/p"), pin=True), m.LoadAdapter(2, AdapterSource("/adapters/q")))
    front.finish()
    asked = [request(i, name, max_tokens=2) for i, name in enumerate("qppqpqpqqp" * 10)]
    for r in asked:
        front.send(m.Submit(r))
        front.turn()
    front.finish()
    assert all(front.tokens(r.id) == expected(r, 0) for r in asked)
    assert list(front.weights) == ["p"]


def test_the_reading_threads_end_with_the_engine(front: Front) -> None:
    before = set(threading.enumerate())
    front.load("a", "b")
    readers = [t for t in threading.enumerate() if t.name == "tandem-loader" and t not in before]
    assert readers
    front.core._adapters.close()
    for t in readers:
        t.join(60)
        assert not t.is_alive()


class Preparation:
    """What has to be ready on the device before the first adapter is served, in a few pieces."""

    def __init__(self, pieces: int = 5):
        self.left = pieces
        self.front: Front | None = None

    def __iter__(self) -> Iterator[None]:
        while self.left:
            assert self.front is not None and self.front.core._pipeline.is_empty, "a piece beside a step"
            self.left -= 1
            yield


@pytest.fixture
def unprepared(make_front: Callable[..., Front]) -> tuple[Front, Preparation]:
    preparation = Preparation()
    preparation.front = front = make_front(pieces=iter(preparation))
    return front, preparation


def test_nothing_is_prepared_for_adapters_before_there_is_one(unprepared: tuple[Front, Preparation]) -> None:
    front, preparation = unprepared
    front.send(m.Submit(request(0)))
    front.finish()
    assert front.tokens(0) == expected(request(0), 0) and preparation.left == 5


def test_a_load_is_answered_when_adapters_can_be_served_and_streams_go_on(
    unprepared: tuple[Front, Preparation],
) -> None:
    front, preparation = unprepared
    front.send(m.Submit(request(0, max_tokens=40)), m.LoadAdapter(100, AdapterSource("/adapters/a")))
    seen: dict[int, int] = {}
    while not front.got(m.AdapterLoaded):
        front.turn()
        seen.setdefault(preparation.left, len(front.tokens(0)))
        assert bool(front.got(m.AdapterLoaded)) <= (preparation.left == 0)
    assert seen[0] > seen[4], "no token came between two pieces"
    front.send(m.Submit(request(1, "a")))
    front.finish()
    for r in (request(0, max_tokens=40), request(1, "a")):
        assert front.tokens(r.id) == expected(r, 0)
    front.assert_nothing_is_held()


def test_a_folder_that_is_refused_prepares_nothing(unprepared: tuple[Front, Preparation]) -> None:
    front, preparation = unprepared

    def refuse(path: Path) -> AdapterWeights:
        raise ModelError("use_dora is not supported", param="use_dora")

    front.read = refuse
    front.load("a")
    assert front.got(m.CallFailed) and preparation.left == 5


@pytest.mark.parametrize("way", ["known of an earlier engine", "published by a trainer"])
def test_a_request_for_an_adapter_waits_until_adapters_can_be_served(
    unprepared: tuple[Front, Preparation], way: str
) -> None:
    front, preparation = unprepared
    digest = adapter("late").info.digest
    if way == "published by a trainer":
        front.core._adapters.publish(adapter("late"))
    else:
        front.send(m.KnowAdapter(adapter("late").info, AdapterSource("/late")))
    front.send(m.Submit(request(0, digest)))
    front.turn(2)
    assert preparation.left > 0 and not front.got(m.Accepted)
    front.finish()
    assert front.tokens(0) == expected(request(0, digest), 0) and preparation.left == 0
    front.assert_nothing_is_held()


def test_an_engine_that_drains_answers_a_load_that_waits(unprepared: tuple[Front, Preparation]) -> None:
    front, preparation = unprepared
    front.send(m.LoadAdapter(100, AdapterSource("/adapters/a")), m.Drain())
    front.core.run()
    front.receive()
    assert front.got(m.AdapterLoaded) and preparation.left == 0
