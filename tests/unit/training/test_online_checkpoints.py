"""Checkpoints of the online loop: how many stay, that none is saved twice, and which one is the best."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import NotFound
from mlx_tandem.files import StorageError
from mlx_tandem.training.store.checkpoints import BEST, CheckpointInfo, Checkpoints
from tests.unit.learning_fakes import Killed, Points, config, group
from tests.unit.online_side import Side, feed, on_a_loop, running
from tests.unit.training.test_online_ends import counted

pytestmark = pytest.mark.usefixtures("at_once")


def listed(folder: Path) -> list[CheckpointInfo]:
    return list(Checkpoints(folder, 1).list())


def unnamed(folder: Path) -> list[CheckpointInfo]:
    return [i for i in listed(folder) if not i.pinned and not i.guards and i.name != BEST]


KINDS = ["update"] * 6 + ["keep", "refused", "checkpoint", "named", "back", "back to", "back to", "switch"]
ACTIONS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=5, max_size=15)


async def act(side: Side, number: int, kind: str, which: int) -> None:
    """Do one thing, with trajectories that no other has."""
    learner = side.learner
    if kind in ("update", "keep"):
        await learner.update(group(number, version=side.version), publish=kind == "update")
    elif kind == "refused":
        await learner.add(group(number, version=side.version, p=-9.0), 2)
        await learner.update()
    elif kind == "checkpoint":
        await learner.checkpoint()
    elif kind == "named":
        name = f"named-{which % 3}"
        if name not in learner.status().available_checkpoints:
            assert await learner.checkpoint(name) == name
    elif kind == "back":
        with contextlib.suppress(NotFound):
            await learner.rollback()
    else:
        places = [*side.learner.status().available_checkpoints]
        places += [str(v.ref.version) for v in learner._learner.versions]
        place = places[which % len(places)]
        with contextlib.suppress(NotFound):  # the optimiser of that time is gone
            await (learner.switch(place) if kind == "switch" else learner.rollback(place))


@settings(max_examples=25)
@given(ACTIONS, st.integers(1, 3))
def test_exactly_so_many_stay_and_none_is_saved_twice(actions: list[tuple[str, int]], keep: int) -> None:
    """Whatever is learned, saved and rolled back: those that nobody named are `keep`, the newest, each with a content
    of its own. Versions that are kept have a folder that is there, or stay in the engine's memory."""

    async def test(folder: Path) -> None:
        seen: set[str] = set()
        async with running(config(folder, interval=1, keep=keep), start=False) as side:
            for number, action in enumerate(actions, 1):
                await act(side, number, *action)
                mine = unnamed(folder)
                seen |= {i.digest for i in mine}
                assert len(mine) == len({i.digest for i in mine}) <= keep
                assert sum(i.guards for i in listed(folder)) <= 1, "only what the journal follows"
                assert [i.name for i in listed(folder)] == list(side.learner.status().available_checkpoints)
                for version in side.learner._learner.versions:
                    if version.folder:
                        assert Path(version.folder).is_dir()
                    elif version.ref.digest in seen:
                        assert version.ref.digest in side.client.pinned, "it was in a folder that is gone"
            assert len(unnamed(folder)) == min(keep, len(seen))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(test(Path(folder)))


@on_a_loop
async def test_two_are_two(tmp_path: Path) -> None:
    """After updates, after going back to one of them, to a version in memory, and to one with a name."""
    async with running(config(tmp_path, interval=1, keep=2), start=False) as side:
        for number in range(1, 6):
            await side.learner.update(group(number, version=side.version))
        assert [i.name for i in unnamed(tmp_path)] == ["checkpoint-5", "checkpoint-4"]
        assert {v.ref.version for v in side.learner._learner.versions} >= {4, 5, 6}, "the three newest"
        files = {p: p.stat().st_ino for p in (tmp_path / "checkpoint-4").iterdir() if p.name != "manifest.json"}
        assert (await side.learner.rollback("checkpoint-4")).version == 5
        assert [i.name for i in unnamed(tmp_path)] == ["checkpoint-4", "checkpoint-5"], "the newest again"
        assert files == {p: p.stat().st_ino for p in files}, "nothing was written again"
        with pytest.raises(NotFound, match="the optimiser of version 4 is gone"):
            await side.learner.rollback("4")
        assert [i.name for i in unnamed(tmp_path)] == ["checkpoint-4", "checkpoint-5"], "as they were"
        await side.learner.update(group(6, version=5), publish=False)
        assert await side.learner.checkpoint("mine") == "mine"
        await side.learner.update(group(8, version=5))
        await side.learner.rollback("mine")
        assert next(i.name for i in listed(tmp_path) if i.name != BEST) == "mine"
        assert await side.learner.checkpoint() == "mine", "which is just that"
        await side.learner.update(group(7, version=5))
        trained, version = side.trained, side.version
    async with running(config(tmp_path, interval=1, keep=2), start=False) as side:
        assert (side.trained, side.version) == (trained, version)
        assert len(unnamed(tmp_path)) == 2


BATCHES = [group(number) for number in range(6)]


async def course(folder: Path, points: list[Points]) -> tuple[Any, ...]:
    """Updates and ways back, by as many processes as it takes; what became of it."""
    steps: list[int | str] = [0, 1, 2, "checkpoint-2", 3, "checkpoint-2", 4, "named", 5, "named"]
    at = 0
    for _ in range(3):
        side = Side(config(folder, interval=2, keep=1, update_frequency=2), points[-1])
        try:
            await side.bring_up()
            if points[-1].broken:
                raise Killed
            assert side.learner.status().updates <= 6, "an update is counted twice"
            while at < len(steps):
                step = steps[at]
                if isinstance(step, int):
                    await side.learner.update(BATCHES[step])
                elif step == "named" and "named" not in side.learner.status().available_checkpoints:
                    await side.learner.checkpoint("named")
                else:
                    await side.learner.rollback(step)
                if points[-1].broken:
                    raise Killed
                at += 1
            status = side.learner.status()
            found = side.trained, side.digest, status.updates, status.step, status.available_checkpoints
            await side.learner.close()
        except Killed:
            await side.kill()
            points.append(Points())
        else:
            return found
    raise AssertionError("it is killed again and again")


def test_killed_at_any_point_of_going_back_it_is_there_or_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above all when the checkpoint that it goes back to is the one that the journal follows."""
    points = [Points()]
    counted(monkeypatch, points)
    whole = asyncio.run(course(tmp_path / "whole", points))
    assert whole[0] == tuple(t.tokens[-1] for i in (0, 1, 4) for t in BATCHES[i])
    assert whole[2:4] == (6, 3)
    total = points[0].count
    for at in range(1, total):
        points.append(Points(at))
        found = asyncio.run(course(tmp_path / str(at), points))
        assert found == whole, f"killed at {at} of {total}"


@on_a_loop
async def test_the_best_is_known_as_soon_as_its_version_has_answers(tmp_path: Path) -> None:
    """A checkpoint is saved before anybody has asked its version."""
    async with running(config(tmp_path, interval=1, keep=2, guard_reward_drop=9.0)) as side:

        async def answered(version: int, number: int, reward: float, updates: int) -> None:
            for n in (number, number + 1):
                await side.learner.add(group(n, version=version, rewards=(reward, reward + 0.25)), 2)
            await side.until(lambda: side.learner.status().updates >= updates and not side.learner.status().buffered)

        await feed(side, [1, 2], 1)
        await side.until(lambda: len(listed(tmp_path)) == 1)
        assert listed(tmp_path)[0].reward is None
        assert BEST not in side.learner.status().available_checkpoints
        await side.learner.add(group(3, version=2, rewards=(0.5, 0.5)), 2)  # nothing to learn from, and answers
        await side.until(lambda: BEST in side.learner.status().available_checkpoints and side.server.relisted > 0)
        best = Checkpoints(tmp_path, 1).verify(BEST)
        assert (best.step, best.version, best.reward) == (1, 2, 0.5)
        await answered(2, 10, 0.25, 2)
        await answered(3, 20, 0.75, 3)
        await side.until(lambda: Checkpoints(tmp_path, 1).verify(BEST).version == 3)
        await answered(4, 30, 0.0, 4)
        await answered(5, 40, 0.0, 5)
        await side.until(lambda: len(unnamed(tmp_path)) == 2 and unnamed(tmp_path)[0].step == 5)
        best = Checkpoints(tmp_path, 1).verify(BEST)
        assert (best.step, best.reward) == (2, 0.875), "though the one that it is a copy of is gone"
        assert {i.reward for i in unnamed(tmp_path) if i.version == 5} == {0.125}


@on_a_loop
async def test_a_drive_that_is_full_does_not_keep_it_from_learning(tmp_path: Path) -> None:
    """What a checkpoint is worth can be noted later."""
    async with running(config(tmp_path, interval=1, guard_reward_drop=9.0)) as side:
        await feed(side, [1, 2], 1)
        await side.until(lambda: len(listed(tmp_path)) == 1)
        checkpoints = side.learner._learner.ledger.checkpoints
        judge, full = checkpoints.judge, []

        def fail(*args: Any) -> CheckpointInfo:
            full.append(args)
            raise StorageError("no space left on the drive")

        checkpoints.judge = fail  # type: ignore[method-assign]
        for number in (3, 4):
            await side.learner.add(group(number, version=2), 2)
        await side.until(lambda: side.learner.status().updates == 2 and bool(full))
        checkpoints.judge = judge  # type: ignore[method-assign]
        await side.learner.add(group(5, version=3), 2)
        await side.until(lambda: BEST in side.learner.status().available_checkpoints)


@on_a_loop
async def test_what_does_not_exist_is_said_at_once_whatever_is_learned(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side, side.learner._lock:
        for ask in (side.learner.rollback, side.learner.switch):
            for name in ("99", "policy@99", "nothing"):
                with pytest.raises(NotFound):
                    await asyncio.wait_for(ask(name), 20)
