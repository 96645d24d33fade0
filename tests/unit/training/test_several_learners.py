"""Several adapters that learn in one server: each is as it would be alone, whatever ends when."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import EngineDied, InvalidRequest, ModelError, TandemError
from mlx_tandem.files import StorageError
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.own_settings import Own, own_settings
from mlx_tandem.training.store.shared import SharedDatabase
from mlx_tandem.training.trajectories import Trajectory
from tests.unit.learning_fakes import Client, Killed, Points, Server, config, died, group
from tests.unit.online_side import full_drive, on_a_loop

pytestmark = pytest.mark.usefixtures("at_once")

ADAPTERS: dict[str, dict[str, Any]] = {
    "policy": {},
    "coder": {"learning_rate": 0.25, "update_frequency": 2},
    "writer": {"algorithm": "dr_grpo", "update_frequency": 6, "steps_per_update": 2},
}
UPDATES = 3


def of_all(folder: Path) -> Config:
    return config(folder, adapters=ADAPTERS)


class Process:
    """A process with several learners over one engine and one database."""

    def __init__(self, own: Sequence[Own], points: Points | None = None) -> None:
        self.points = points or Points()
        self.client = Client(self.points)
        shared = SharedDatabase(own[0].database)
        self.servers = {each.name: Server(self.client, name=each.name) for each in own}
        self.learners = {
            each.name: OnlineLearner(
                each.config,
                cast(EngineClient, self.client),
                self.servers[each.name],
                clock=lambda: 5.0,
                shared=shared,
            )
            for each in own
        }
        self._threads = ThreadPoolExecutor(4)

    async def bring_up(self) -> None:
        asyncio.get_running_loop().set_default_executor(self._threads)
        for learner in self.learners.values():
            await learner.bring_up()
            learner.start()

    async def teach(self, name: str) -> None:
        """Bring everything that an adapter learns from, each time as much as an update takes, and wait for its end."""
        learner = self.learners[name]
        for number in range(UPDATES):
            await learner.add(lesson(name, number), 2)
            for _ in range(20_000):
                status = learner.status()
                if (status.updates > number and not status.recovering) or self.points.broken:
                    break
                await asyncio.sleep(0.0001)
            else:
                raise AssertionError(f"nothing happens: {status}")

    def found(self, name: str) -> tuple[Any, ...]:
        """What an adapter has learned, and the versions that there are."""
        versions = [v.ref.label for v in self.servers[name].registry.versions(name)]
        return *self.client.trainers[name].state, versions[-1], self.learners[name].status().updates

    async def kill(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        loop, last = asyncio.get_running_loop(), ThreadPoolExecutor(4)
        loop.set_default_executor(last)
        for learner in self.learners.values():
            learner._learner.ledger.checkpoints.close()
            learner._learner.ledger.shared.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        loops = [learner._loop.task for learner in self.learners.values() if learner._loop.task is not None]
        await asyncio.gather(*tasks, *loops, return_exceptions=True)
        for learner in self.learners.values():
            await learner.rewards.close()
        last.shutdown()

    async def close(self) -> None:
        await asyncio.gather(*(learner.close() for learner in self.learners.values()))


def lesson(name: str, number: int) -> list[Trajectory]:
    """What one update of an adapter learns from; no two have a token or an id in common."""
    first = 1 + 100 * list(ADAPTERS).index(name) + 10 * number
    own = {"policy": 2, "coder": 1, "writer": 3}[name]
    return [t for k in range(own) for t in group(first + k)]


async def alone(folder: Path, name: str) -> tuple[Any, ...]:
    """What an adapter learns in a server that trains no other."""
    several = own_settings(of_all(folder / "none"))
    training = next(own.config.rl_training for own in several if own.name == name)
    single = msgspec.structs.replace(of_all(folder / name), rl_training=training)
    process = Process(own_settings(single))
    await process.bring_up()
    await process.teach(name)
    found = process.found(name)
    await process.close()
    return found


@on_a_loop
async def test_each_learns_what_it_learns_alone(tmp_path: Path) -> None:
    expected = {name: await alone(tmp_path / "alone", name) for name in ADAPTERS}
    process = Process(own_settings(of_all(tmp_path / "together")))
    await process.bring_up()
    await asyncio.gather(*map(process.teach, ADAPTERS))
    assert {name: process.found(name) for name in ADAPTERS} == expected
    assert len({found[1] for found in expected.values()}) == 3, "each with its own rate and steps"
    await process.close()
    assert sorted(p.name for p in (tmp_path / "together").iterdir() if p.is_dir() and p.name in ADAPTERS) == [
        "coder",
        "writer",
    ]
    again = Process(own_settings(of_all(tmp_path / "together")))
    await again.bring_up()
    assert {name: again.found(name)[:3] for name in ADAPTERS} == {name: expected[name][:3] for name in ADAPTERS}
    await again.close()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("whole", [True, False], ids=["process", "engine"])
def test_whatever_ends_when_each_learns_what_it_learns_alone(tmp_path: Path, seed: int, *, whole: bool) -> None:
    """The process, or the engine, ends at three places by chance, while all learn at once."""

    async def test() -> None:
        expected = {name: await alone(tmp_path / "alone", name) for name in ADAPTERS}
        own, draw = own_settings(of_all(tmp_path / "together")), random.Random(seed)
        points = Points(error=Killed)
        process = Process(own, points)

        def ended() -> EngineDied:
            process.client.state = "restarting"
            return died()

        if not whole:
            points.error = ended
        for _ in range(3):
            points.at = points.count + draw.randint(1, 150)
            await attempt(process)
            if whole:
                await process.kill()
                process = Process(own, Points(error=Killed))
                points = process.points
            else:
                process.client.restart()
                process.client.state = "ready"
        points.at = 0
        await process.bring_up()
        await asyncio.gather(*map(process.teach, ADAPTERS))
        found = {name: process.found(name) for name in ADAPTERS}
        await process.close()
        assert {name: (*each[:3], each[-1]) for name, each in found.items()} == {
            name: (*each[:3], each[-1]) for name, each in expected.items()
        }

    asyncio.run(test())


async def attempt(process: Process) -> None:
    """Learn until everything is learned or something has ended."""
    try:
        await process.bring_up()
    except (Killed, EngineDied):
        return
    done = [asyncio.ensure_future(process.teach(name)) for name in ADAPTERS]
    await asyncio.wait(done)
    for each in done:
        if not isinstance(each.exception(), Killed | TandemError | None):
            await each


@on_a_loop
async def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    process = Process(own_settings(of_all(tmp_path)))
    await process.bring_up()
    original = process.client.run_pass

    async def run_pass(batches: Any, **more: Any) -> Any:
        if batches[0].trainer == "coder":
            raise ModelError("no memory for this")
        return await original(batches, **more)

    process.client.run_pass = run_pass  # type: ignore[method-assign]
    await asyncio.gather(*map(process.teach, ADAPTERS))
    outcomes = {name: {report.outcome for report in each.history} for name, each in process.learners.items()}
    assert outcomes == {"policy": {"published"}, "coder": {"skipped"}, "writer": {"published"}}
    process.learners["policy"].stop()
    running = {name: each.status().running for name, each in process.learners.items()}
    assert running == {"policy": False, "coder": True, "writer": True}
    await process.close()


@on_a_loop
async def test_a_full_drive_delays_all_of_them_and_changes_nothing(tmp_path: Path) -> None:
    """They share one file: what it does not take is acknowledged to nobody, and each goes on when there is room."""
    expected = {name: await alone(tmp_path / "alone", name) for name in ADAPTERS}
    process = Process(own_settings(of_all(tmp_path / "together")))
    await process.bring_up()
    await process.teach("policy")
    with full_drive():
        for name in ("coder", "writer"):
            with pytest.raises(StorageError, match="full"):
                await process.learners[name].add(lesson(name, 0), 2)
        assert await process.learners["coder"].folder.error() == "", "the folder is there"
        assert [each.status().updates for each in process.learners.values()] == [UPDATES, 0, 0]
    await asyncio.gather(*map(process.teach, ADAPTERS))
    assert {name: process.found(name) for name in ADAPTERS} == expected
    await process.close()


@on_a_loop
async def test_a_folder_of_one_that_is_removed_is_noticed(tmp_path: Path) -> None:
    process = Process(own_settings(of_all(tmp_path)))
    await process.bring_up()
    await asyncio.gather(*map(process.teach, ADAPTERS))
    (tmp_path / "coder").rename(tmp_path / "elsewhere")  # at once, whatever is being written there
    errors = {name: await each.folder.error() for name, each in process.learners.items()}
    assert "coder was removed or replaced" in errors.pop("coder")
    assert errors == {"policy": "", "writer": ""}
    await asyncio.gather(*(each.close() for each in process.learners.values()), return_exceptions=True)


@on_a_loop
async def test_the_folder_belongs_to_all_of_them_until_the_last_has_closed(tmp_path: Path) -> None:
    own = own_settings(of_all(tmp_path))
    process = Process(own)
    await process.bring_up()
    first, *others = process.learners.values()
    await first.close()
    with pytest.raises(StorageError, match="is in use by process"):
        await Process(own).bring_up()
    await others[0].add(lesson("coder", 0), 2)
    await asyncio.gather(*(each.close() for each in others))
    again = Process(own)
    await again.bring_up()
    assert again.learners["coder"].status().trajectories_collected == 2
    await again.close()


# --- settings ------------------------------------------------------------------------------------------------------


def test_each_has_its_own_settings_and_its_own_folder(tmp_path: Path) -> None:
    whole = config(tmp_path, adapters=ADAPTERS, atropos_url="http://localhost:8001")
    policy, coder, writer = own_settings(whole)
    addresses = [each.config.rl_training.atropos_url for each in (policy, coder, writer)]
    assert addresses == ["http://localhost:8001", "", ""], "what comes from there has one learner"
    assert [each.name for each in (policy, coder, writer)] == ["policy", "coder", "writer"]
    assert [each.config.rl_training.learning_rate for each in (policy, coder, writer)] == [0.5, 0.25, 0.5]
    assert writer.config.rl_training.algorithm == "dr_grpo" and policy.config.rl_training.algorithm == "grpo"
    folders = [Path(each.config.checkpointing.checkpoint_dir) for each in (policy, coder, writer)]
    assert folders == [tmp_path, tmp_path / "coder", tmp_path / "writer"]
    assert {each.database for each in (policy, coder, writer)} == {tmp_path}
    assert [each.prefix for each in (policy, coder, writer)] == ["", "coder.", "writer."]
    (only,) = own_settings(config(tmp_path))
    assert only.config == config(tmp_path), "one adapter alone has the settings as they are"


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"adapters": {"coder": {}}}, "does not name 'policy', the default adapter: add it there, or set"),
        ({"adapters": {"policy": {}, "a/b": {}}}, "the name 'a/b' in 'rl_training.adapters' must be 1 to 64 letters"),
        ({"adapters": {"policy": {}, "Policy": {}}}, "must differ in more than case"),
        ({"adapters": {"policy": {}, "journal": {}}}, "the name of a folder beside the checkpoints"),
        ({"adapters": {"policy": {}, "policy-reference": {}}}, "is reserved for 'policy'"),
        (
            {"adapters": {"policy": {"learning_rat": 1.0}}},
            "rl_training.adapters.policy.learning_rat is not a parameter",
        ),
        (
            {"adapters": {"policy": {"learning_rate": "fast"}}},
            "rl_training.adapters.policy.learning_rate must be a number or 'auto'",
        ),
        ({"adapters": {"policy": {"learning_rate": -1.0}}}, "'rl_training.adapters.policy.learning_rate' is -1.0: it"),
        (
            {"adapters": {"policy": {"algorithm": "best"}}},
            "rl_training.adapters.policy.algorithm must be one of 'cispo', 'dapo'",
        ),
        ({"adapters": {"policy": {"enabled": True}}}, "'rl_training.adapters.policy.enabled' belongs to the server"),
        ({"adapters": {"policy": {"adapters": {}}}}, "'rl_training.adapters.policy.adapters' belongs to the server"),
        ({"adapters": {"policy": {"atropos_url": "x"}}}, "'rl_training.adapters.policy.atropos_url' belongs to the"),
    ],
)
def test_what_is_refused(tmp_path: Path, training: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        own_settings(config(tmp_path, **training))


@on_a_loop
async def test_what_was_learned_is_found_again_whichever_adapter_is_the_default(tmp_path: Path) -> None:
    """One that learned beneath stays there; one that learned in the folder itself has to stay the default."""
    process = Process(own_settings(of_all(tmp_path)))
    await process.bring_up()
    await asyncio.gather(*map(process.teach, ADAPTERS))
    expected = process.found("coder")[:3]
    await process.close()
    (only,) = own_settings(config(tmp_path, adapter="coder", **ADAPTERS["coder"]))
    assert Path(only.config.checkpointing.checkpoint_dir) == tmp_path / "coder"
    process = Process([only])
    await process.bring_up()
    assert process.found("coder")[:3] == expected
    await process.close()
    other = tmp_path / "another" / "coder"
    other.mkdir(parents=True)
    for file in (".lock", "learning.db"):
        (other / file).touch()
    (only,) = own_settings(config(other.parent, adapter="coder"))
    assert Path(only.config.checkpointing.checkpoint_dir) == other.parent, "another server's folder is left alone"
    with pytest.raises(InvalidRequest, match=r"coder, the folder of 'coder', has a learning\.db of its own"):
        own_settings(of_all(other.parent))
    with pytest.raises(InvalidRequest, match=r"'policy' has learned in .* as the default adapter"):
        own_settings(config(tmp_path, adapter="coder", adapters={"coder": {}, "policy": {}}))
