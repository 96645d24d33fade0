"""The online loop across restarts, of the engine and of the server: what is served and learned is as it was."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from mlx_tandem.errors import EngineDied, EngineError, EngineUnavailable, ModelError, NotFound
from mlx_tandem.files import StorageError
from mlx_tandem.training.online import states
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.records import Began
from mlx_tandem.training.store.saved import Saved
from tests.unit.learning_fakes import Points, config, died, group
from tests.unit.online_side import Side, feed, full_drive, on_a_loop, running

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.promise("FLT-53")
@on_a_loop
async def test_an_update_is_on_the_drive_before_it_is_computed(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        seen: list[Began | None] = []
        original = side.client.run_pass

        async def run_pass(*args: Any, **more: Any) -> Any:
            database = Database.read_only(tmp_path)
            seen.append(Saved(database, "policy").pending())
            database.close()
            return await original(*args, **more)

        side.client.run_pass = run_pass  # type: ignore[method-assign]
        await feed(side, [1, 2], 1)
        assert [each.step for each in seen if each is not None] == [1, 1], "the pass, and how far the policy moved"


@on_a_loop
async def test_what_was_learned_and_not_published_is_there_after_a_restart(tmp_path: Path) -> None:
    side = Side(config(tmp_path))
    await side.bring_up()
    await side.learner.add([t for n in (1, 2) for t in group(n)], 2)
    assert (await side.learner.update(publish=False)).outcome == "kept"
    await side.kill()
    async with running(config(tmp_path), start=False) as side:
        assert (side.version, side.trained) == (1, (100, 101, 200, 201))
        await side.learner.add([t for n in (3, 4) for t in group(n, p=-3.0)], 2)
        report = await side.learner.update()
        assert (report.outcome, report.version) == ("published", 2), "tokens of version 1 are not the trainer's"


@on_a_loop
async def test_an_update_that_was_not_to_be_published_is_not_after_a_restart_either(tmp_path: Path) -> None:
    side = Side(config(tmp_path), Points(error=died))
    await side.bring_up()
    await side.learner.add([t for n in (1, 2) for t in group(n)], 2)
    side.points.at = side.points.count + 1
    with pytest.raises(EngineDied):
        await side.learner.update(publish=False)
    await side.kill()
    async with running(config(tmp_path)) as side:
        await side.until(lambda: side.learner.status().updates == 1)
        assert (side.learner.history[-1].outcome, side.version, len(side.trained)) == ("kept", 1, 4)


@pytest.fixture
def one_state(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One state of the trainer is saved, and then none for a long time."""
    monkeypatch.setattr(states, "REST", 1e9)


async def five_updates(folder: Path) -> tuple[int, tuple[int, ...]]:
    """By a process that ends suddenly, with a state after the first: the version and what is learned."""
    side = Side(config(folder))
    await side.bring_up()
    side.learner.start()
    for i in range(5):
        await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
    async with side.learner._lock:  # what the last update leaves to be done has been done
        found = side.version, side.trained
    await side.kill()
    return found


@pytest.mark.usefixtures("one_state")
@on_a_loop
async def test_while_updates_are_computed_again_the_newest_state_is_served(tmp_path: Path) -> None:
    version, trained = await five_updates(tmp_path)
    side = Side(config(tmp_path))
    original, go_on = side.client.run_pass, asyncio.Event()

    async def run_pass(*args: Any, **more: Any) -> Any:
        await go_on.wait()
        return await original(*args, **more)

    side.client.run_pass = run_pass  # type: ignore[method-assign]
    await side.learner.bring_up()
    side.learner.start()
    for _ in range(20):
        await asyncio.sleep(0)
    status = side.learner.status()
    assert (side.version, len(side.trained), status.recovering, status.updates) == (2, 4, 4, 5)
    assert side.server.expected == [4, 5, 6], "the last three are there again when they have been computed"
    asked = asyncio.create_task(side.learner.checkpoint("asked-early"))
    go_on.set()
    assert await asked == "asked-early"
    assert (side.version, side.trained, side.server.expected) == (version, trained, []), "before anything new"
    assert side.learner.status().recovering == 0
    assert [v.ref.version for v in side.server.registry.versions("policy")] == [2, 4, 5, 6]
    await side.learner.add([t for n in (11, 12) for t in group(n, version=2)], 2)
    await side.until(lambda: side.learner.status().updates == 6)
    assert (side.version, side.trained) == (7, (*trained, 1100, 1101, 1200, 1201))
    await side.learner.close()


@pytest.mark.usefixtures("one_state")
@on_a_loop
async def test_updates_that_cannot_be_computed_again_stop_learning_and_not_serving(tmp_path: Path) -> None:
    found = await five_updates(tmp_path)
    side = Side(config(tmp_path))
    original = side.client.run_pass

    async def run_pass(*args: Any, **more: Any) -> Any:
        raise ModelError("no memory for this")

    side.client.run_pass = run_pass  # type: ignore[method-assign]
    await side.learner.bring_up()
    side.learner.start()
    await side.until(lambda: not side.learner.status().running)
    status = side.learner.status()
    assert "no memory for this" in status.reason and status.recovering and side.version == 2
    side.client.run_pass = original  # type: ignore[method-assign]
    side.learner.start()
    await side.until(lambda: not side.learner.status().recovering)
    assert (side.version, side.trained) == found
    await side.learner.close()


@pytest.mark.usefixtures("one_state")
@on_a_loop
async def test_an_engine_that_ends_while_updates_are_computed_again_does_not_stop_learning(tmp_path: Path) -> None:
    found = await five_updates(tmp_path)
    side = Side(config(tmp_path))
    original, end = side.client.run_pass, asyncio.Event()

    async def run_pass(*args: Any, **more: Any) -> Any:
        await end.wait()
        side.points.broken = True
        raise died()

    side.client.run_pass = run_pass  # type: ignore[method-assign]
    await side.learner.bring_up()
    side.learner.start()
    end.set()
    await side.until(lambda: side.points.broken)
    for _ in range(20):  # the engine is known to have ended a while before the next one is counted
        await asyncio.sleep(0)
    assert side.learner.status().running
    side.client.run_pass = original  # type: ignore[method-assign]
    side.client.restart()
    await side.bring_up()
    await side.until(lambda: not side.learner.status().recovering)
    assert side.learner.status().running
    assert (side.version, side.trained) == found
    await side.learner.close()


def test_a_server_that_ends_while_a_checkpoint_gets_its_name_lets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not begin another one in the same folder beside it."""
    begun, go_on = threading.Event(), threading.Event()
    original, commits = Checkpoints.commit, []

    def commit(*args: Any, **more: Any) -> Any:
        commits.append(args)
        begun.set()
        assert go_on.wait(20)
        return original(*args, **more)

    monkeypatch.setattr(Checkpoints, "commit", commit)

    async def test() -> None:
        side = Side(config(tmp_path))
        await side.bring_up()
        side.learner.start()
        await feed(side, [1, 2], 1)
        asked = asyncio.create_task(side.learner.checkpoint())
        await asyncio.to_thread(begun.wait, 20)
        ending = asyncio.create_task(side.learner.close())
        await asyncio.wait({asked})
        for _ in range(50):
            await asyncio.sleep(0.001)  # time enough to begin another
        assert not ending.done() and len(commits) == 1
        with pytest.raises(EngineUnavailable):  # it would be neither in this checkpoint nor in the journal after it
            await side.learner.update(group(3))
        go_on.set()
        await ending
        assert len(commits) == 1
        async with running(config(tmp_path), start=False) as side:
            assert [info.name for info in side.learner._learner.ledger.listed] == ["checkpoint-1"]
            assert not side.learner._learner.trainer.left, "the journal begins after it"
            assert (side.version, side.trained) == (2, (100, 101, 200, 201))
            assert (await side.learner.update(group(3))).outcome == "published", "it was not taken for known"

    asyncio.run(test())


@pytest.mark.usefixtures("one_state")
@on_a_loop
async def test_what_was_switched_to_is_served_again_by_the_next_engine(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        for i in range(4):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        assert (await side.learner.switch("4")).version == 4
        trained = side.trained
        side.client.restart()
        await side.learner.bring_up()
        assert side.version == 2, "all that there is at first, under its own number"
        await side.until(lambda: not side.learner.status().recovering)
        assert (side.version, side.trained) == (4, trained)
        await feed(side, [9, 10], 5)
        assert side.version == 6


@on_a_loop
async def test_versions_that_went_with_the_engine_cannot_be_asked_for(tmp_path: Path) -> None:
    async with running(config(tmp_path, interval=2)) as side:
        for i in range(3):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        await side.until(lambda: side.learner.status().checkpoint_saves == 1)
        side.client.restart()
        await side.bring_up()
        assert (side.version, len(side.trained)) == (4, 12)
        with pytest.raises(NotFound):
            await side.learner.rollback("2")
        assert (await side.learner.rollback("3")).version == 3, "the checkpoint's"


@on_a_loop
async def test_an_update_that_ends_every_engine_is_given_up(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:

        async def step_trainer(*args: Any, **options: Any) -> Any:
            side.points.broken = True
            raise died()

        original, side.points.error = side.client.step_trainer, died
        side.client.step_trainer = step_trainer  # type: ignore[method-assign,assignment]
        await side.learner.add([t for n in (1, 2) for t in group(n)], 2)
        for _ in range(3):
            await side.until(lambda: side.points.broken)
            side.client.restart()
            await side.bring_up()
        await side.until(lambda: side.learner.status().updates == 1)
        assert side.learner.history[-1].outcome == "skipped"
        side.client.step_trainer = original  # type: ignore[method-assign]
        await feed(side, [3, 4], 2)
        assert (side.version, side.trained) == (2, (300, 301, 400, 401))


@pytest.mark.promise("FLT-57")
@on_a_loop
async def test_a_state_that_is_damaged_loses_nothing(tmp_path: Path) -> None:
    """The one before it and the updates since then lead to the same trainer."""
    found = await five_updates(tmp_path)
    numbers = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob(".state-*"))
    assert numbers == [3, 4, 5]
    (tmp_path / ".state-policy-5" / "trainer.json").write_text("{}")
    async with running(config(tmp_path), start=False) as side:
        await side.until(lambda: not side.learner.status().recovering)
        assert (side.version, side.trained) == found
        assert {v.ref.version for v in side.server.registry.versions("policy")} == {4, 5, 6}, "those that states have"
        (tmp_path / ".state-policy-4").rename(tmp_path / "elsewhere")
    async with running(config(tmp_path), start=False) as side:
        assert (side.version, side.trained) == found


@on_a_loop
async def test_when_no_state_is_whole_updates_are_lost_and_nothing_is_learned_twice(tmp_path: Path) -> None:
    side = Side(config(tmp_path, interval=2))
    await side.bring_up()
    side.learner.start()
    for i in range(5):
        await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
    await side.until(lambda: side.learner.status().checkpoint_saves == 2)
    await side.learner.add(group(11), 2)
    await side.kill()
    for damaged in [*tmp_path.glob(".state-*"), tmp_path / "checkpoint-4"]:
        (damaged / "trainer.json").write_text("{}")
    side = Side(config(tmp_path, interval=2))
    await side.bring_up()
    side.learner.start()
    assert side.trained == tuple(n * 100 + i for n in range(1, 5) for i in range(2)), "as in checkpoint-2"
    assert (tmp_path / "checkpoint-4.corrupt").is_dir()
    assert side.learner.status().buffered == 2
    for number in range(1, 11):
        await side.learner.add(group(number), 2)
    assert side.learner.status().dropped_duplicate == 20
    await feed(side, [12], side.learner.status().updates + 1)
    version, trained = side.version, side.trained
    await side.kill()
    async with running(config(tmp_path, interval=2)) as side:
        await side.until(lambda: (side.version, side.trained) == (version, trained))
        assert trained[-4:] == (1100, 1101, 1200, 1201), "what came after the damage is exact again"


@on_a_loop
async def test_an_update_that_is_worth_another_attempt_is_made_by_the_next_process(tmp_path: Path) -> None:
    """A last checkpoint would forget it."""
    async with running(config(tmp_path), start=False) as side:
        await side.learner.update(group(1))

        async def fail(*args: object, **options: object) -> NoReturn:
            raise EngineError("the pass failed")

        side.client.run_pass = fail  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="the pass failed"):
            await side.learner.update(group(2))
    async with running(config(tmp_path), start=False) as side:
        await side.learner.update(group(3))
        assert side.trained == (100, 101, 200, 201, 300, 301)


@pytest.mark.usefixtures("one_state")
@on_a_loop
async def test_a_server_that_ends_in_the_middle_of_an_update_saves_nothing_of_it(tmp_path: Path) -> None:
    """The engine has done the step, and nobody has judged it. The next process does it again."""
    side = Side(config(tmp_path))
    await side.bring_up()
    for number in (1, 2):
        await side.learner.update(group(number))
    original, asked = side.client.run_pass, asyncio.Event()

    async def run_pass(*args: Any, forward_only: bool = False, **more: Any) -> Any:
        if forward_only:
            asked.set()
            await asyncio.Event().wait()
        return await original(*args, forward_only=forward_only, **more)

    side.client.run_pass = run_pass  # type: ignore[method-assign]
    update = asyncio.create_task(side.learner.update(group(3)))
    await asked.wait()
    await side.learner.close()
    await asyncio.wait({update})
    async with running(config(tmp_path)) as side:
        await side.until(lambda: side.learner.status().updates == 3)
        status = side.learner.status()
        assert (side.trained, status.step, status.version) == ((100, 101, 200, 201, 300, 301), 3, 4)


@on_a_loop
async def test_an_engine_that_ends_while_the_drive_is_full_is_made_up_for_by_the_loop_alone(tmp_path: Path) -> None:
    """Nobody can ask for the trained adapter meanwhile, so that no request reminds the loop."""
    async with running(config(tmp_path)) as side:
        await feed(side, [1, 2], 1)
        trained, loop = side.trained, side.learner._loop
        await side.until(lambda: bool(loop._wake._waiters))  # type: ignore[attr-defined]
        side.learner._learner.ledger.put()
        side.client.restart()
        with full_drive(), pytest.raises(StorageError):
            await side.learner.bring_up()
        assert not side.learner._learner.is_up
        await side.until(lambda: side.learner._learner.is_up)
        assert (side.version, side.trained) == (2, trained)
