"""Requests that follow an adapter's name over its versions: slots, memory and the version that each token names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from msgspec import structs

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import core as core_module
from mlx_tandem.engine import messages as m
from mlx_tandem.errors import ModelError
from mlx_tandem.types import AdapterRef, AdapterSource, Request
from tests.engine.front import Front, adapter, request
from tests.engine.workloads import expected, make_engine

MakeFront = Callable[..., Front]


def ref(version: int, name: str = "p") -> AdapterRef:
    return AdapterRef(name, version, f"{name}{version}")


def follower(number: int, version: int = 1, **more: int) -> Request:
    return structs.replace(request(number, **more), adapter=ref(version), follow=True)


# --- the scheduler -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_row_is_the_new_version_s_and_the_row_in_flight_the_old_one_s(depth: int) -> None:
    loop = make_engine(depth=depth).loop
    loop.add(follower(0, max_tokens=9))
    for _ in range(4):
        loop.step()
    loop.follow(ref(2))
    loop.run()
    assert loop.versions[0, 0] == [1] * 4 + [2] * 5  # by then 4 were launched; at depth 1 one of them was not read
    loop.assert_idle()


def test_keys_and_values_are_kept() -> None:
    engine = make_engine(depth=0)
    engine.loop.add(follower(0, max_tokens=9))
    for _ in range(4):
        engine.loop.step()
    engine.loop.follow(ref(2))
    engine.loop.run()
    assert engine.runner.positions == 5 + 8
    assert engine.runner.uploads == 2


@pytest.mark.promise("I9")
def test_who_waits_begins_under_the_new_version_and_who_is_pinned_stays() -> None:
    loop = make_engine(max_num_seqs=1).loop
    loop.add(structs.replace(follower(0), follow=False))
    loop.add(follower(1))
    loop.add(structs.replace(follower(2), adapter=ref(1, "q")))
    loop.step()
    loop.follow(ref(2))
    loop.run()
    assert loop.versions[0, 0] == [0] * 6
    assert loop.tokens[0, 0] == expected(loop.requests[0], 0)
    assert loop.versions[1, 0] == [2] * 6
    assert loop.tokens[1, 0] == expected(structs.replace(follower(1), adapter=ref(2)), 0)
    assert loop.versions[2, 0] == [1] * 6


@pytest.mark.promise("FLT-51")
def test_without_a_free_slot_the_old_version_goes_on_until_there_is_one() -> None:
    loop = make_engine(max_loras=2, depth=0).loop
    loop.add(follower(0, max_tokens=12))
    loop.add(request(1, "other", max_tokens=5))
    loop.step()
    loop.follow(ref(2))
    loop.step()
    loop.follow(ref(3))
    loop.run()
    assert loop.versions[0, 0] == [1] * 5 + [3] * 7
    loop.assert_idle()


def test_choices_go_on_together() -> None:
    loop = make_engine(depth=0).loop
    loop.add(follower(0, n=3, length=9, max_tokens=5))
    loop.step()
    loop.follow(ref(2))
    loop.step()
    loop.follow(ref(3))
    loop.run()
    assert {tuple(versions) for key, versions in loop.versions.items()} == {(2, 3, 3, 3, 3)}
    loop.assert_idle()


def test_the_same_content_under_another_version_moves_no_slot() -> None:
    engine = make_engine(depth=0)
    engine.loop.add(follower(0, max_tokens=4))
    engine.loop.step()
    engine.loop.follow(AdapterRef("p", 2, "p1"))
    engine.loop.run()
    assert engine.loop.versions[0, 0] == [1, 2, 2, 2]
    assert engine.runner.uploads == 1


def wait_for_the_reader(front: Front) -> None:
    """Until what is being read has been, before another step is made."""
    done = front.core._adapters._loader._done
    done.put(done.get(timeout=60))


# --- the loop ----------------------------------------------------------------------------------------------------


def test_an_old_version_leaves_memory_once_nobody_runs_under_it(make_front: MakeFront) -> None:
    front = make_front()
    front.load("p1", "p2", "q")
    front.send(m.Submit(follower(0, max_tokens=20)), m.Submit(request(1, "q", max_tokens=8)))
    front.turn(3)
    front.send(m.FollowAdapter(ref(2)), m.UnloadAdapter(7, "p1"))
    front.turn(2)
    assert "p1" in front.weights, "both slots are in use, so it is still needed"
    front.finish()
    assert list(front.weights) == ["p2", "q"]
    assert {d.version for d in front.deltas if d.request == 0} == {1, 2}
    front.assert_nothing_is_held()


def test_a_version_that_left_memory_is_read_before_it_is_followed(make_front: MakeFront) -> None:
    """A roll back to it, while the old one serves; who waits for its own adapter begins under it, too."""
    front = make_front(most_loaded=1)
    front.load("p1", "p2")
    assert list(front.weights) == ["p2"]
    held = threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert held.wait(60)
        return adapter(path.name)

    front.read = slow
    front.send(m.Submit(follower(0, 2, max_tokens=30)))
    front.turn(3)
    front.send(m.FollowAdapter(ref(1)))
    front.turn(3)
    held.set()
    wait_for_the_reader(front)
    front.finish()
    versions = [d.version for d in front.deltas]
    assert set(versions) == {1, 2}
    assert versions == sorted(versions, reverse=True)
    front.assert_nothing_is_held()


def test_a_version_that_is_read_too_late_is_not_followed(make_front: MakeFront) -> None:
    """The name has moved on while it was read."""
    front = make_front(most_loaded=1)
    front.load("p1", "p3")
    held = threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert held.wait(60)
        return adapter(path.name)

    front.read = slow
    front.send(m.Submit(follower(0, 3, max_tokens=20)))
    front.turn(3)
    front.send(m.Submit(structs.replace(request(1, max_tokens=2), adapter=ref(1))), m.FollowAdapter(ref(1)))
    front.turn()
    front.send(m.FollowAdapter(AdapterRef("p", 4, "p3")))
    front.turn()
    held.set()
    wait_for_the_reader(front)
    front.finish()
    assert {d.version for d in front.deltas if d.request == 0} == {3, 4}
    front.assert_nothing_is_held()


def test_requests_that_wait_for_the_old_version_begin_under_the_new_one(make_front: MakeFront) -> None:
    front = make_front(most_loaded=1)
    front.load("p1", "p2")
    held = threading.Event()

    def slow(path: Path) -> AdapterWeights:
        assert held.wait(60)
        return adapter(path.name)

    front.read = slow
    front.send(m.Submit(follower(0)), m.Submit(structs.replace(follower(1), follow=False)))
    front.turn()
    front.send(m.FollowAdapter(ref(2)))
    front.turn()
    held.set()
    front.finish()
    assert {d.version for d in front.deltas if d.request == 0} == {2}
    assert front.tokens(0) == expected(structs.replace(follower(0), adapter=ref(2)), 0)
    assert front.tokens(1) == expected(structs.replace(follower(1), follow=False), 0)
    front.assert_nothing_is_held()


def test_a_version_that_cannot_be_had_changes_nothing(make_front: MakeFront) -> None:
    front = make_front(most_loaded=1)
    front.load("p2", "p1")

    def gone(path: Path) -> AdapterWeights:
        raise ModelError("it is not there")

    front.read = gone
    front.send(m.Submit(follower(0, max_tokens=12)))
    front.turn(2)
    front.send(m.FollowAdapter(ref(9)), m.FollowAdapter(ref(2)))
    front.finish()
    assert front.tokens(0) == expected(follower(0, max_tokens=12), 0)
    assert {d.version for d in front.deltas} == {1}
    assert not front.got(m.Failed)
    front.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(25))
def test_any_order_of_versions_is_survived(make_front: MakeFront, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publishes, rolls back, unloads, cancels and failing steps at random: memory and slots hold what is needed, and
    in the end nothing is held."""
    monkeypatch.setattr(core_module, "STRIKES", 10_000)
    rng = Random(seed)
    front = make_front(
        max_loras=rng.randint(1, 3),
        most_loaded=rng.choice((0, 1, 2)),
        fail={i: rng.choice(("launch", "half", "wait")) for i in range(300) if rng.random() < 0.02},
    )
    front.load("p1")
    known, current, number = {1}, 1, 0
    cancelled: set[int] = set()
    for _ in range(150):
        if rng.random() < 0.35:
            kind = follower(number, current, max_tokens=rng.randint(1, 12), n=rng.randint(1, 3))
            front.send(m.Submit(structs.replace(kind, follow=rng.random() < 0.7, background=rng.random() < 0.3)))
            number += 1
        if rng.random() < 0.15:
            current = max(known) + 1
            known.add(current)
            front.core._adapters.publish(adapter(f"p{current}"))
            front.send(m.FollowAdapter(ref(current)))
            if rng.random() < 0.5:
                front.send(m.KnowAdapter(adapter(f"p{current}").info, AdapterSource(f"/adapters/p{current}")))
        if rng.random() < 0.05:
            current = rng.choice(sorted(known))
            front.send(m.FollowAdapter(ref(current)))
        if len(known) > 3 and rng.random() < 0.3:
            known.discard(old := next(v for v in sorted(known) if v != current))
            front.send(m.UnloadAdapter(1, f"p{old}"))
        if number and rng.random() < 0.05:
            cancelled.add(gone := rng.randrange(number))
            front.send(m.Cancel(gone))
        front.turn()
        front.core._adapters.store.check()
        front.scheduler.check()
    front.finish()
    failed = {f.request for f in front.got(m.Failed)}
    unloaded = {"model_not_found", "adapter_changed"}
    assert not {f.code for f in front.got(m.Failed)} - {"step_failed", *unloaded}
    assert front.finished() | failed | cancelled == set(range(number))
    front.assert_nothing_is_held()
    assert not front.core._adapters.holds.has_left
