"""The online loop: it learns from each completion once, whatever ends when, and never serves what is worse."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict, EngineDied, EngineUnavailable, InvalidRequest, ModelError, NotFound
from mlx_tandem.training.online import loop
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.journal import Journal
from mlx_tandem.training.store.records import Began, Record
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import SamplingParams
from tests.unit.learning_fakes import Client, Killed, Points, Server, config, died, group

TRAINER = "policy"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(loop, "POLL_SECONDS", 0.0)


def on_a_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


class Side:
    """One process: a learner, its engine and its server."""

    def __init__(self, config: Config, points: Points | None = None, answer: Callable[[float], str] = lambda _: "no"):
        self.points = points or Points()
        self.client = Client(self.points)
        self.server = Server(self.client, answer)
        self.learner = OnlineLearner(config, cast(EngineClient, self.client), self.server, clock=lambda: 5.0)

    @property
    def trained(self) -> tuple[int, ...]:
        return self.client.trainers[TRAINER].trained

    @property
    def digest(self) -> str:
        return self.client.trainers[TRAINER].digest

    @property
    def version(self) -> int:
        ref = self.server.current()
        return 0 if ref is None else ref.version

    async def kill(self) -> None:
        """Nothing of what was not on the drive is left."""
        ledger = self.learner._learner.ledger
        ledger.checkpoints.close()
        if ledger._journal is not None and ledger._journal._fd >= 0:
            os.close(ledger._journal._fd)
            ledger._journal._fd = -1
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await self.learner.rewards.close()
        await asyncio.gather(*tasks, self.learner._loop.task or asyncio.sleep(0), return_exceptions=True)

    async def bring_up(self) -> None:
        """To where it was."""
        await self.learner.bring_up()
        await self.until(lambda: not self.learner.status().recovering)

    async def until(self, done: Callable[[], bool]) -> None:
        """Let everything run until `done`, or until something has ended for good."""
        for _ in range(20_000):
            if done() or self.points.broken:
                return
            await asyncio.sleep(0.0001)
        raise AssertionError(f"nothing happens: {self.learner.status()}")


@contextlib.asynccontextmanager
async def running(
    config: Config, answer: Callable[[float], str] = lambda _: "no", *, start: bool = True
) -> AsyncIterator[Side]:
    side = Side(config, answer=answer)
    await side.bring_up()
    if start:
        side.learner.start()
    try:
        yield side
    finally:
        await side.learner.close()


async def feed(side: Side, numbers: Sequence[int], updates: int) -> None:
    for number in numbers:
        await side.learner.add(group(number), 2)
    await side.until(lambda: side.learner.status().updates >= updates)


@on_a_loop
async def test_what_is_collected_is_learned_and_published(tmp_path: Path) -> None:
    async with running(config(tmp_path, warmup_steps=2)) as side:
        assert side.version == 1, "the fresh adapter is served before anything is learned"
        await side.learner.add(group(1), 2)
        await side.learner.add(group(1), 2)
        await side.learner.add(group(2, rewards=(1.0, 1.0)), 2)
        await asyncio.sleep(0.01)
        assert side.learner.status().updates == 0, "two completions are not four"
        await feed(side, [3], 1)
        status, report = side.learner.status(), side.learner.history[-1]
        assert side.trained == (100, 101, 300, 301)
        assert [w for d in side.client.passes[0].data for w in d.weights] == pytest.approx([-1, 1, -1, 1], abs=1e-3)
        assert (side.version, side.client.followed[-1].version) == (2, 2)
        assert (report.outcome, report.step, report.version, report.groups) == ("published", 1, 2, 2)
        assert (report.trajectories, report.mean_reward, report.verdict) == (4, 0.5, "ok")
        assert (status.dropped_duplicate, status.skipped_groups, status.trajectories_collected) == (2, 1, 6)
        assert (status.current_lora, status.step, status.publishes, status.buffered) == ("policy@2", 1, 1, 0)
        assert status.last_update == "1970-01-01T00:00:05Z"
        assert report.ready_ms > 0 and report.swap_ms > 0
        assert side.client.rates == [0.25], "half of the warm-up"
        assert msgspec.json.decode(msgspec.json.encode([status, report]))


@on_a_loop
async def test_batches_add_up_to_one_step(tmp_path: Path) -> None:
    async with running(config(tmp_path, gradient_accumulation_steps=2)) as side:
        await feed(side, [1, 2, 3], 0)
        await asyncio.sleep(0.01)
        assert not side.client.passes
        await feed(side, [4], 1)
        assert [len(b.data) for b in side.client.passes] == [4, 4]
        assert side.client.trainers[TRAINER].step == 1
        assert sum(b.loss.scale for b in side.client.passes) == pytest.approx(1.0)


@on_a_loop
async def test_too_old_completions_are_dropped(tmp_path: Path) -> None:
    async with running(config(tmp_path, max_staleness=1)) as side:
        await feed(side, [1, 2], 1)
        await feed(side, [3, 4], 2)
        assert side.version == 3
        await feed(side, [5, 6], 2)
        await side.until(lambda: side.learner.status().dropped_stale == 4)
        await side.learner.add([*group(9), *group(7, version=2)], 2)
        await side.until(lambda: side.learner.status().dropped_stale == 6)
        await asyncio.sleep(0.01)
        assert side.learner.status().updates == 2, "what is left is too little"
        await side.learner.add(group(8, version=2), 2)
        await side.until(lambda: side.learner.status().updates == 3)
        assert side.trained[-4:] == (700, 701, 800, 801)
    async with running(config(tmp_path)) as side:
        assert side.learner.status().buffered == 0, "the next start knows that they were dropped"


@on_a_loop
async def test_old_versions_go_and_those_with_a_checkpoint_stay(tmp_path: Path) -> None:
    async with running(config(tmp_path, interval=4)) as side:
        for i in range(8):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        await side.until(lambda: side.version == 9 and len(side.server.saves) == 2 and 6 in side.server.retired)
        # 1 made all completions, so it is the best there is to go back to; 5 and 9 have checkpoints.
        assert [e.ref.version for e in side.server.registry.versions(TRAINER)] == [1, 5, 7, 8, 9]
        assert side.learner.status().available_checkpoints[:2] == ("checkpoint-8", "checkpoint-4")


@on_a_loop
async def test_manual_updates(tmp_path: Path) -> None:
    async with running(config(tmp_path), start=False) as side:
        external = [
            Trajectory(f"x{i}", "gx", (1,), (7 + i,), (), (), (), 0.7, float(i), external=True) for i in range(2)
        ]
        report = await side.learner.update(external, publish=False, checkpoint_name="mine")
        assert (report.outcome, report.version, side.version) == ("kept", 0, 1)
        assert (report.ready_ms, report.swap_ms) == (0, 0), "nothing was published"
        assert [d.logprobs for d in side.client.passes[0].data] == [(-1.0,), (-1.0,)], "the trainer's own"
        assert side.learner.status().available_checkpoints == ("mine",)
        report = await side.learner.update(external)
        assert report.outcome == "skipped", "the same ids again"
        assert side.learner.status().dropped_duplicate == 2
        with pytest.raises(Conflict):
            await side.learner.update(external, checkpoint_name="mine")
        await side.learner.add(group(1), 2)
        report = await side.learner.update()
        assert (report.outcome, report.version, report.trajectories) == ("published", 2, 2)
        assert report.mismatch_k3 == 0.0, "no token is of the trainer's present weights, which were never served"
        assert side.trained == (7, 8, 100, 101)


@on_a_loop
async def test_without_training_everything_is_collected_and_nothing_learned(tmp_path: Path) -> None:
    async with running(config(tmp_path, mode="inference_only")) as side:
        await feed(side, [1, 2, 3], 0)
        await asyncio.sleep(0.01)
        status = side.learner.status()
        assert (status.updates, status.buffered, status.running, side.version) == (0, 6, False, 1)
        with pytest.raises(Conflict):
            await side.learner.update()
    async with running(config(tmp_path)) as side:
        await side.until(lambda: side.learner.status().updates == 1)


@on_a_loop
async def test_an_update_is_on_the_drive_before_it_is_computed(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        ledger = side.learner._learner.ledger
        seen: list[Record] = []
        original = side.client.run_pass

        async def run_pass(*args: Any, **more: Any) -> Any:
            shutil.copytree(ledger.checkpoints.folder / "journal", tmp_path / f"copy{len(seen)}")
            seen.append(Journal.open(tmp_path / f"copy{len(seen)}")[1][-1])
            return await original(*args, **more)

        side.client.run_pass = run_pass  # type: ignore[method-assign]
        await feed(side, [1, 2], 1)
        assert [type(record) for record in seen] == [Began, Began]


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


async def five_updates(folder: Path) -> tuple[int, tuple[int, ...]]:
    """By a process that ends suddenly, with a checkpoint after the first: the version and what is learned."""
    side = Side(config(folder))
    await side.bring_up()
    side.learner.start()
    for i in range(5):
        await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        if i == 0:
            await side.learner.checkpoint("first")
    await side.learner._learner.ledger.flush()
    found = side.version, side.trained
    await side.kill()
    return found


@on_a_loop
async def test_while_updates_are_computed_again_the_checkpoint_is_served(tmp_path: Path) -> None:
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


@on_a_loop
async def test_what_was_switched_to_is_served_again_by_the_next_engine(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        for i in range(4):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        assert (await side.learner.switch("4")).version == 4
        trained = side.trained
        side.client.restart()
        await side.learner.bring_up()
        assert side.version == 1, "all that there is at first, under its own number"
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

        async def step_trainer(*args: Any) -> Any:
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


@on_a_loop
async def test_a_damaged_checkpoint_loses_updates_and_nothing_is_learned_twice(tmp_path: Path) -> None:
    side = Side(config(tmp_path, interval=2))
    await side.bring_up()
    side.learner.start()
    for i in range(5):
        await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
    await side.until(lambda: side.learner.status().checkpoint_saves == 2)
    await side.learner.add(group(11), 2)
    await side.kill()
    (tmp_path / "checkpoint-4" / "trainer.json").write_text("{}")
    side = Side(config(tmp_path, interval=2))
    await side.bring_up()
    side.learner.start()
    assert side.trained == tuple(n * 100 + i for n in range(1, 5) for i in range(2)), "as in checkpoint-2"
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


# -- the guard --------------------------------------------------------------------------------------------------------


@on_a_loop
async def test_a_sampler_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        await side.learner.add([t for n in (1, 2) for t in group(n, p=-2.0)], 2)
        await side.until(lambda: side.learner.status().updates == 1)
        report = side.learner.history[-1]
        assert (report.outcome, side.version) == ("refused", 1)
        assert not side.trained and not side.client.trainers[TRAINER].gradients
        await side.learner.add([t for n in (3, 4) for t in group(n, p=-1.1)], 2)
        await side.until(lambda: side.learner.status().updates == 2)
        assert side.learner.history[-1].verdict == "corrected"
        assert side.trained == (300, 301, 400, 401)
    async with running(config(tmp_path)) as side:
        assert side.trained == (300, 301, 400, 401), "what was refused is not learned at the next start either"


@on_a_loop
async def test_a_step_that_goes_too_far_is_taken_back_and_the_next_is_half_as_long(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate=80.0)) as side:
        await feed(side, [1, 2], 1)
        report = side.learner.history[-1]
        assert (report.outcome, side.version, side.trained) == ("rolled_back", 1, ())
        assert "moved" in report.reason and report.kl > 0.5
        await feed(side, [3, 4], 2)
        assert side.client.rates == [80.0, 40.0]
    async with running(config(tmp_path, learning_rate=80.0)) as side:
        assert side.learner.status().rollbacks == 2
        await feed(side, [5, 6], 3)
        assert side.learner.history[-1].outcome == "rolled_back"
        assert side.client.rates == [20.0], "restarts do not forget"
        await side.until(lambda: not side.learner.status().running)
        assert "3 updates in a row" in side.learner.status().reason
        await feed(side, [7, 8], 3)
        side.learner.start()
        await side.until(lambda: side.learner.status().updates == 4)
        assert side.learner.status().publishes == 1


@on_a_loop
async def test_gradients_that_are_not_finite(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        side.client.broken_gradients = True
        await feed(side, [1, 2], 1)
        report = side.learner.history[-1]
        assert (report.outcome, report.grad_norm, side.trained) == ("rolled_back", 0.0, ())


def validated(folder: Path, count: int = 4) -> Path:
    path = folder / "validation.jsonl"
    lines = [
        {"prompt": f"p{i}", "scoring_function": "exact_match", "metadata": {"answer": "yes"}} for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@on_a_loop
async def test_a_version_that_answers_worse_is_never_current(tmp_path: Path) -> None:
    served: list[int] = []

    def answer(shift: float) -> str:
        return "yes" if shift < 0.9 else "no"

    async with running(config(tmp_path / "c", validation_prompts=str(validated(tmp_path))), answer) as side:
        await feed(side, [1, 2], 1)
        assert (side.version, side.learner.history[-1].validation) == (2, 1.0)
        await feed(side, [3, 4], 2)
        report = side.learner.history[-1]
        assert (report.outcome, report.validation, side.version) == ("rolled_back", 0.0, 2)
        assert "validation" in report.reason
        await side.until(lambda: 3 in side.server.retired)
        await feed(side, [5, 6], 3)
        assert side.learner.history[-1].outcome == "published", "half as far"
        assert side.client.trainers[TRAINER].shift == 0.75
        served.append(side.version)
        assert await side.learner.checkpoint() == "checkpoint-2"
        assert Checkpoints(tmp_path / "c", 9).list()[0].reward == 1.0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2"),
        ('{"prompt": "x", "scoring_function": "gsm8k"}', "metadata.answer"),
        ('{"prompt": "x", "scoring_function": "nothing"}', "nothing"),
        ('{"prompt": "", "scoring_function": "contains", "metadata": {"answer": "a"}}', "0 tokens"),
        ('{"prompt": "x", "scoring_function": "contains", "metadata": {"answer": "a"}, "max_tokens": 0}', "max_tokens"),
        ('{"prompt": "x", "scoring_function": "length", "other": 0}', "other"),
    ],
)
def test_wrong_validation_prompts_are_refused_at_the_start(tmp_path: Path, line: str, says: str) -> None:
    async def test() -> None:
        path = validated(tmp_path, 1)
        path.write_text(path.read_text() + "\n" + line)
        side = Side(config(tmp_path / "c", validation_prompts=str(path)))
        try:
            with pytest.raises(InvalidRequest, match="line 2") as e:
                await side.bring_up()
            assert says in str(e.value)
        finally:
            await side.learner.close()

    asyncio.run(test())


@on_a_loop
async def test_rewards_of_live_traffic_that_fall_bring_the_better_version_back(tmp_path: Path) -> None:
    async with running(config(tmp_path, guard_reward_drop=0.2)) as side:
        await side.learner.add([t for n in (1, 2) for t in group(n, rewards=(0.8, 1.0))], 2)
        await side.until(lambda: side.version == 2)
        bad = [t for n in range(3, 8) for t in group(n, version=2, p=-1.05, rewards=(0.0, 0.1))]
        side.learner.stop()
        await side.learner.add(bad, 2)
        side.learner.start()
        await side.until(lambda: side.learner.status().rollbacks == 1)
        await side.until(lambda: len(side.server.saves) == 1)
        assert side.version == 1 and side.trained == ()
        assert side.learner.status().learning_rate == 0.25
    async with running(config(tmp_path), start=False) as side:
        assert side.trained[:4] != (100, 101, 200, 201), "it is still rolled back after a restart"


@on_a_loop
async def test_rollback_and_switch(tmp_path: Path) -> None:
    async with running(config(tmp_path)) as side:
        for i in range(3):
            await feed(side, [2 * i + 1, 2 * i + 2], i + 1)
        assert await side.learner.checkpoint("mine") == "mine"
        await feed(side, [7, 8], 4)
        assert side.version == 5
        assert (await side.learner.switch("mine")).version == 4
        assert (side.version, len(side.trained)) == (4, 16), "the trainer goes on"
        assert (await side.learner.switch("policy@3")).version == 3
        ref = await side.learner.rollback("mine")
        assert (ref.version, side.version, len(side.trained)) == (4, 4, 12)
        assert side.client.followed[-1] == ref
        ref = await side.learner.rollback("3")
        assert (ref.version, len(side.trained)) == (3, 8)
        for wrong in ("99", "policy@98", "nothing"):
            with pytest.raises(NotFound):
                await side.learner.rollback(wrong)
        assert len(side.trained) == 8
        ids = side.learner._learner.ledger.buffer.seen
    async with running(config(tmp_path)) as side:
        assert (side.version, side.trained) == (3, (100, 101, 200, 201, 300, 301, 400, 401))
        await side.learner.add(group(7), 2)
        assert side.learner.status().dropped_duplicate == 2, "learned once, on a course that was left"
        assert set(side.learner._learner.ledger.buffer.seen) == set(ids)


@on_a_loop
async def test_recorded_prompts_are_sampled_again_when_there_is_too_little(tmp_path: Path) -> None:
    async with running(config(tmp_path, group_size=4), lambda shift: "yes", start=False) as side:
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        side.learner.record_prompt((1, 2, 3), scoring, SamplingParams(8, temperature=0.0))
        side.learner.start()
        await side.until(lambda: side.learner.status().updates >= 3)
        report = side.learner.history[0]
        assert (report.trajectories, report.mean_reward, report.outcome) == (4, 0.5, "published")
        assert len(set(side.server.seeds)) == len(side.server.seeds), "never the same draw twice"


# -- whatever ends when -----------------------------------------------------------------------------------------------

UPDATES = 5
BATCHES = [[t for n in (2 * i + 1, 2 * i + 2) for t in group(n)] for i in range(UPDATES)]
BATCHES[2] = [t for n in (5, 6) for t in group(n, version=3, p=-3.0)]  # refused
EXPECTED = tuple(t.tokens[-1] for i in (0, 1, 3, 4) for t in BATCHES[i])


def counted(monkeypatch: pytest.MonkeyPatch, points: list[Points]) -> None:
    """Writing is a place where the process can end, too: before it and after it."""
    for owner, name in ((Journal, "_extend"), (Journal, "_change"), (Checkpoints, "new"), (Checkpoints, "commit")):
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
