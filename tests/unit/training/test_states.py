"""States of the trainer: how often one is saved, which are kept, and what the folder of an earlier version comes to."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_tandem import files
from mlx_tandem.errors import EngineError
from mlx_tandem.files import StorageError
from mlx_tandem.training.online import states, takeover
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.store.checkpoints import Checkpoints
from mlx_tandem.training.store.manifests import Manifest
from tests.unit.learning_fakes import config, group, nothing
from tests.unit.online_side import Side, full_drive, on_a_loop, running

OLD_FOLDER = Path(__file__).parent / "old_folder"
"""A folder that a version before `learning.db` wrote: `checkpoint-3`, after it in the journal an update that
has ended and one that has begun, a trajectory that waits for its sibling, and one that waits for its reward.
"""


async def learn(side: Side, *numbers: int, publish: bool = True) -> None:
    for number in numbers:
        report = await side.learner.update(group(number), publish=publish)
        assert report.outcome == ("published" if publish else "kept")


def folders(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in folder.glob(".state-*"))


@on_a_loop
async def test_saving_takes_a_twentieth_of_the_time(tmp_path: Path) -> None:
    """Each state takes two seconds here, and each update four."""
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states.time, "monotonic", lambda: now[0])
        side = Side(config(tmp_path))
        save = side.client.save_trainer

        async def slow(*args: Any) -> None:
            now[0] += 2.0
            await save(*args)

        side.client.save_trainer = slow  # type: ignore[method-assign]
        await side.bring_up()
        saved = []
        for number in range(1, 25):
            before = now[0]
            await learn(side, number)
            saved += [number] if now[0] > before else []
            now[0] += 4.0
        assert saved == [1, 11, 21], "after 40 seconds each"
        await side.kill()
    ledger = Ledger(config(tmp_path))
    await ledger.open(nothing)
    with_data = [u.number for u in ledger.saved.updates() if u.is_kept]
    assert with_data == list(range(2, 25)), "what lies between states can be computed again"
    await ledger.close()


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_the_newest_three_states_are_kept_and_the_last_that_was_published(tmp_path: Path) -> None:
    side = Side(config(tmp_path))
    await side.bring_up()
    await learn(side, 1, 2, 3, 4)
    assert folders(tmp_path) == [2, 3, 4]
    await learn(side, 5, 6, 7, 8, publish=False)
    assert folders(tmp_path) == [4, 6, 7, 8]
    served, trained = side.version, side.trained
    save = side.client.save_trainer

    async def fail(*args: Any) -> None:
        raise EngineError("the drive is full")

    side.client.save_trainer = fail  # type: ignore[method-assign]
    await learn(side, 9, publish=False)
    side.client.save_trainer = save  # type: ignore[method-assign]
    await learn(side, 10, publish=False)
    assert folders(tmp_path) == [4, 7, 8, 9]
    trained = (*trained, 900, 901, 1000, 1001)
    assert side.trained == trained
    await side.kill()
    side = Side(config(tmp_path))
    await side.bring_up()
    assert (side.version, side.trained) == (served, trained), "what was published is served, and training is further"
    assert [folders(tmp_path), side.learner._learner.versions.head] == [[4, 7, 8, 9], None]
    await learn(side, 11)
    assert side.version == served + 1
    await side.learner.close()


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_an_adapter_whose_name_begins_like_another_s_keeps_its_states(tmp_path: Path) -> None:
    for adapter in ("policy-1", "policy"):
        async with running(config(tmp_path, adapter=adapter), start=False) as side:
            side.server.name = adapter
            report = await side.learner.update(group(1))
            assert report.outcome == "published"
    assert {p.name for p in tmp_path.glob(".state-*")} == {".state-policy-1-1", ".state-policy-1"}


@pytest.mark.promise("FLT-32")
@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_the_folder_of_an_earlier_version_is_taken_over_once(tmp_path: Path) -> None:
    """Nothing of it is lost or learned twice; whatever ends on the way."""
    folder = tmp_path / "old"
    shutil.copytree(OLD_FOLDER, folder)
    said: list[str] = []
    for again in range(2):
        side = Side(config(folder))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(takeover.log, "warning", lambda message, **_: said.append(message))
            await side.bring_up()
        status, ledger = side.learner.status(), side.learner._learner.ledger
        assert (side.version, side.trained) == (5, (100, 101, 200, 201, 300, 301, 400, 401))
        assert (status.updates, status.step, status.publishes) == (4, 4, 3)
        assert ([t.id for t, _ in ledger.buffer.held], status.open_trajectories) == (["t6-0"], 1)
        assert ledger.pending is not None and ledger.pending.began.trajectories == ("t5-0", "t5-1")
        assert [t.id for t in ledger.pending.trajectories] == ["t5-0", "t5-1"]
        assert [report.step for report in side.learner.history] == [1, 2, 3, 4]
        assert (status.trajectories_collected, ledger.buffer.counts.taken) == (9, 4)
        assert said == ["taken over into learning.db from an earlier version"]
        assert {p.name for p in folder.iterdir() if p.name.endswith("taken-over")} == {
            "journal.taken-over", "history.jsonl.taken-over",
        }  # fmt: skip
        if again:
            break
        (folder / "journal.taken-over").rename(folder / "journal")  # it was ended before they had other names
        await side.kill()
    side.learner.start()
    await side.until(lambda: side.learner.status().updates == 5)
    assert side.trained[-2:] == (500, 501) and side.version == 6
    await side.learner.later.reward("later", 1.0)
    for number in range(1, 6):
        await side.learner.add(group(number), 2)
    assert side.learner.status().dropped_duplicate == 10, "all of it was learned from"
    await side.learner.close()


def database_rows(side: Side) -> list[tuple[Any, ...]]:
    return side.learner._learner.ledger.saved.database.rows("SELECT id FROM trajectories")


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_an_old_journal_that_does_not_fit_its_checkpoint_gives_its_trajectories(tmp_path: Path) -> None:
    """Its updates came after a checkpoint that is gone. A damaged one is refused, and nothing is changed."""
    for kind in ("cut", "gone", "damaged"):
        folder = tmp_path / kind
        shutil.copytree(OLD_FOLDER, folder)
        (journal,) = (folder / "journal").iterdir()
        content = journal.read_bytes()
        if kind == "gone":
            shutil.rmtree(folder / "checkpoint-3")
        elif kind == "cut":
            journal.write_bytes(content[:-3])  # the last write was not acknowledged
        else:
            journal.write_bytes(content[:400] + b"?" + content[401:])
        side = Side(config(folder))
        if kind == "damaged":
            with pytest.raises(StorageError, match=r"is damaged at byte \d+ or of another format and cannot be taken"):
                await side.bring_up()
            journal.write_bytes(content)
            with full_drive(), pytest.raises(StorageError, match="disk is full"):
                await side.bring_up()
        await side.bring_up()
        held = [t.id for t, _ in side.learner._learner.ledger.buffer.held]
        assert held == (["t5-0", "t5-1", "t6-0"] if kind == "cut" else ["t6-0"])
        assert len(side.trained) == (0 if kind == "gone" else 8)
        await side.learner.add(group(4), 2)
        assert side.learner.status().dropped_duplicate == 2
        assert {row[0] for row in database_rows(side)} >= {"t5-0", "t5-1", "t6-0"}
        await side.learner.close()


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_updates_that_the_newest_checkpoint_holds_are_not_taken_over_again(tmp_path: Path) -> None:
    """The earlier version was ended when the checkpoint after update 4 was there and its journal was not."""
    folder = tmp_path / "old"
    shutil.copytree(OLD_FOLDER, folder)
    book = Checkpoints(folder, 10)
    book.lock()
    before, new = book.verify("checkpoint-3"), book.new("checkpoint-4")
    trained = (100, 101, 200, 201, 300, 301, 400, 401)
    (new / "trainer.json").write_text(json.dumps({"step": 4, "shift": 2.0, "trained": trained}))
    counters = before.counters | {"follows": before.label, "began": 1, "updates": 4, "last_version": 5}
    book.commit(new, replace(before, name="checkpoint-4", step=4, version=5, digest="", counters=counters))
    book.close()
    side = Side(config(folder))
    await side.bring_up()
    ledger = side.learner._learner.ledger
    assert (side.trained, side.version, side.learner.status().updates) == (trained, 5, 4)
    assert ledger.pending is not None and ledger.pending.began.trajectories == ("t5-0", "t5-1")
    await side.kill()


@pytest.mark.usefixtures("at_once")
@on_a_loop
async def test_a_state_that_is_a_checkpoint_may_go_with_it(tmp_path: Path) -> None:
    """The first state after a takeover is the checkpoint itself."""
    shutil.copytree(OLD_FOLDER, tmp_path / "old")
    async with running(config(tmp_path / "old", keep=1, interval=1), start=False) as side:
        await side.learner.update()
        await learn(side, 7, 8)
        assert "checkpoint-3" not in side.learner.status().available_checkpoints
        version, trained = side.version, side.trained
        side.client.restart()
        await side.bring_up()
        assert (side.version, side.trained) == (version, trained)


def test_the_fixture_is_what_the_earlier_version_wrote() -> None:
    manifest = json.loads((OLD_FOLDER / "checkpoint-3" / "manifest.json").read_bytes())["manifest"]
    assert {"follows", "began", "compared", "records"} <= manifest["counters"].keys()


@pytest.mark.parametrize("what", ["state", "checkpoint"])
def test_saving_that_is_given_up_touches_no_folder_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Whoever saves next uses a folder of the same name: work on it that went on would empty it again."""
    entered, go_on = threading.Event(), threading.Event()
    remove = files.remove_tree

    def slow(path: Path, *more: Any) -> None:
        if not entered.is_set():
            entered.set()
            go_on.wait(60)
        remove(path, *more)

    async def test() -> None:
        ledger = Ledger(config(tmp_path))
        await ledger.open(nothing)
        monkeypatch.setattr(files, "remove_tree", slow)

        async def write(folder: str) -> None:
            pass

        def saving() -> asyncio.Task[Any]:
            if what == "state":
                return asyncio.ensure_future(states.States(ledger, "policy").new())
            manifest = Manifest(name="checkpoint-1", step=1, version=0, digest="d")
            return asyncio.ensure_future(ledger.save(manifest, write))

        given_up = saving()
        await asyncio.to_thread(entered.wait, 60)
        given_up.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        is_done = given_up.done()
        go_on.set()
        await asyncio.wait({given_up})
        assert given_up.cancelled() and not is_done, "the caller goes on only when its thread has ended"
        await saving()
        await ledger.close()

    asyncio.run(test())
