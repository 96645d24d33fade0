"""Whatever ends at any point of the online loop: nothing is lost, and nothing is learned twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.files import StorageError
from mlx_tandem.training.online.learner import MAX_ATTEMPTS
from mlx_tandem.training.online.states import States
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.database import Database
from tests.unit.learning_fakes import Killed, Points, config, died, group
from tests.unit.online_side import Side, full_drive, on_a_loop, running, validated

pytestmark = pytest.mark.usefixtures("at_once")


UPDATES = 5
BATCHES = [[t for n in (2 * i + 1, 2 * i + 2) for t in group(n)] for i in range(UPDATES)]
BATCHES[2] = [t for n in (5, 6) for t in group(n, version=3, p=-3.0)]  # refused
EXPECTED = tuple(t.tokens[-1] for i in (0, 1, 3, 4) for t in BATCHES[i])


def counted(monkeypatch: pytest.MonkeyPatch, points: list[Points]) -> None:
    """Writing is a place where the process can end, too: before it and after it."""
    for owner, name in ((Database, "write"), (Checkpoints, "new"), (Checkpoints, "commit"), (States, "_clear")):
        original = getattr(owner, name)
        if asyncio.iscoroutinefunction(original):

            async def around(self: Any, *args: Any, original: Any = original) -> Any:
                points[-1]()
                done = await original(self, *args)
                points[-1]()
                return done
        else:

            def around(self: Any, *args: Any, original: Any = original) -> Any:  # type: ignore[misc]
                points[-1]()
                done = original(self, *args)
                points[-1]()
                return done

        monkeypatch.setattr(owner, name, around)


async def scenario(folder: Path, points: list[Points], **settings: Any) -> tuple[str, tuple[int, ...], int]:
    """All batches are learned from by as many processes as it takes; what became of it."""
    for _ in range(3):
        side = Side(config(folder, interval=2, **settings), points[-1])
        try:
            await side.bring_up()
            side.learner.start()
            for i, batch in enumerate(BATCHES):
                await side.learner.add(batch, 2)  # again, if the process before has not said that it has them
                await side.until(lambda: side.learner.status().updates > i)  # noqa: B023
                if points[-1].broken:
                    raise Killed
            await side.until(lambda: side.learner.status().checkpoint_saves >= 2)  # noqa: B023
            if points[-1].broken:
                raise Killed
            found = side.digest, side.trained, side.version
            assert {i.step for i in side.learner._learner.ledger.listed} >= {2, 3}, "after every other update"
            await side.learner.close()
        except Killed:
            await side.kill()
            points.append(Points())
        else:
            return found
    raise AssertionError("it is killed again and again")


def learn(folder: Path, points: list[Points], **settings: Any) -> tuple[str, tuple[int, ...], int]:
    return asyncio.run(scenario(folder, points, **settings))


@pytest.mark.promise("FLT-48")
def test_killed_at_any_point_it_goes_on_as_if_nothing_had_been(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Points()]
    counted(monkeypatch, points)
    whole = learn(tmp_path / "whole", points)
    assert whole[1] == EXPECTED
    total = points[0].count
    assert total > 60
    for at in range(1, total):
        points.append(Points(at))
        assert learn(tmp_path / str(at), points) == whole, f"killed at {at} of {total}"


def test_killed_while_candidates_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Points()]
    counted(monkeypatch, points)
    prompts = str(validated(tmp_path, 1))
    whole = learn(tmp_path / "whole", points, validation_prompts=prompts)
    assert whole[1] == EXPECTED
    for at in random.Random(points[0].count).sample(range(1, points[0].count), 8):
        points.append(Points(at))
        found = learn(tmp_path / str(at), points, validation_prompts=prompts)
        assert found == whole, f"killed at {at} of {points[0].count}"


@pytest.mark.parametrize("restart", [True, False], ids=["the engine ends", "one call fails"])
def test_when_the_engine_fails_at_any_point_the_same_process_goes_on(tmp_path: Path, restart: bool) -> None:
    async def go(folder: Path, points: Points) -> tuple[str, tuple[int, ...], int]:
        side = Side(config(folder, interval=2))
        await side.bring_up()
        side.points.at, side.points.error, side.points.count = points.at, died, 0
        side.learner.start()

        async def on(done: Callable[[], bool]) -> None:
            while not done():
                await side.until(done)
                if side.points.broken and restart:
                    side.client.restart()
                    await side.bring_up()
                side.points.broken = False

        for i, batch in enumerate(BATCHES):
            await side.learner.add(batch, 2)
            await on(lambda: side.learner.status().updates > i)  # noqa: B023
        await on(lambda: side.learner.status().checkpoint_saves >= 2 or side.points.count > 500)
        found = side.digest, side.trained, side.version
        points.count = side.points.count
        await side.learner.close()
        return found

    # What is served is no place where an engine ends.
    plain = Points()
    whole = asyncio.run(go(tmp_path / "whole", plain))
    assert whole[1] == EXPECTED
    for at in range(1, plain.count):
        assert asyncio.run(go(tmp_path / str(at), Points(at))) == whole, f"at {at} of {plain.count}"


@on_a_loop
async def test_a_drive_that_is_full_for_long_loses_no_update(tmp_path: Path) -> None:
    """It is tried again as often as it takes, and no other one begins in its place."""
    async with running(config(tmp_path)) as side:
        ledger = side.learner._learner.ledger
        with full_drive():
            with pytest.raises(StorageError):
                await side.learner.add([*group(1), *group(2)], 2)
            await side.until(lambda: ledger.pending is not None and ledger.pending.attempts > 2 * MAX_ATTEMPTS)
            assert side.learner.status().updates == 0
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.learner.history[-1].outcome == "published"
