"""The ledger: what it drops it says, and another process reads from the journal what this one had."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem import files
from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.files import StorageError
from mlx_tandem.training import trajectories
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.update import Pending
from mlx_tandem.training.store import database
from mlx_tandem.training.store.checkpoints import CheckpointInfo
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Began, Ended
from mlx_tandem.training.trajectories import Trajectory
from tests.unit.learning_fakes import config, group, nothing
from tests.unit.online_side import full_drive, on_a_loop, running

pytestmark = pytest.mark.usefixtures("at_once")

FEW = 6
"""Ids that are remembered in these tests, so that they are forgotten, too."""


def trajectory(number: int, name: str, reward: float, version: int) -> Trajectory:
    return Trajectory(f"t{number}", name, (1,), (2,), (-1.0,), (-1.0,), (version,), 1.0, reward)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 12), st.sampled_from("abc"), st.sampled_from([0.0, 1.0])),
        st.tuples(st.just("too old"), st.integers(0, 12)),
        st.tuples(st.just("publish")),
        st.tuples(st.just("take"), st.integers(0, 3)),
    ),
    max_size=40,
)


async def lived(folder: Path, steps: list[Any]) -> Ledger:
    """A ledger after `steps`, whose process has ended without a word."""
    ledger = Ledger(config(folder, trajectory_buffer_size=3, max_staleness=1))
    await ledger.open(nothing)
    version = 1
    for kind, *what in steps:
        if kind == "add":
            number, name, reward = what
            await ledger.add([(trajectory(number, name, reward, version), 0)])
        elif kind == "too old":
            late = trajectory(what[0], "a", 0.0, version)
            ledger.drop_stale([] if ledger.buffer.knows(late.id) else [late.id])
        elif kind == "publish":
            version += 1
        elif taken := [t for g in ledger.take(what[0], version) for t in g]:
            ledger.begin(Pending(Began(1, tuple(t.id for t in taken), (), AdamParams(0.0), 0), taken))
            ledger.end(Ended(1, "refused"))
    await ledger.flush()
    await ledger.close()
    return ledger


@settings(max_examples=150)
@given(STEPS)
def test_another_process_has_the_same_buffer_and_forgets_the_same_ids_next(steps: list[Any]) -> None:
    """Also when so many came that ids are forgotten: what is dropped counts as new then."""

    async def test(folder: Path) -> None:
        before = await lived(folder, steps)
        after = Ledger(config(folder, trajectory_buffer_size=3, max_staleness=1))
        await after.open(nothing)
        assert after.buffer.held == before.buffer.held
        assert after.buffer.seen == before.buffer.seen
        assert after.buffer.counts.dropped_stale == before.buffer.counts.dropped_stale
        await after.close()

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trajectories, "SEEN_IDS", FEW)
        asyncio.run(test(Path(folder)))


def test_what_was_dropped_for_its_age_is_not_taken_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it was the oldest that was known, and others came since."""
    monkeypatch.setattr(trajectories, "SEEN_IDS", FEW)
    others = [("too old", n) for n in range(1, FEW + 1)]
    steps = [("add", 0, "a", 0.0), *others[:-1], ("publish",), ("publish",), ("take", 0), others[-1]]

    async def test() -> None:
        before = await lived(tmp_path, steps)
        assert before.buffer.counts.dropped_stale == FEW + 1
        after = Ledger(config(tmp_path, trajectory_buffer_size=3))
        await after.open(nothing)
        for ledger in (before, after):
            for number in (0, FEW):
                assert not ledger.buffer.add(trajectory(number, "a", 1.0, 3))
        await after.close()

    asyncio.run(test())


def test_many_at_once_do_not_fill_the_memory_when_a_slow_drive_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All wait for the same write; the first that go on leave no room for the others, which wait again."""
    monkeypatch.setattr(database, "BEHIND", most := 2000)
    write, opened = Database.write, threading.Event()
    waiting: list[int] = []

    def slow(self: Database, statements: Any) -> None:
        opened.wait()
        waiting.append(writer.waiting_bytes)
        write(self, statements)

    async def test() -> None:
        nonlocal writer
        ledger = Ledger(config(tmp_path, trajectory_buffer_size=100))
        await ledger.open(nothing)
        assert ledger._writer is not None
        writer = ledger._writer
        monkeypatch.setattr(Database, "write", slow)
        adding = [asyncio.ensure_future(ledger.add([(trajectory(n, f"g{n}", 1.0, 1), 0)])) for n in range(60)]
        await asyncio.sleep(0)
        assert ledger.is_behind
        opened.set()
        await asyncio.gather(*adding)
        assert max(waiting) <= most + 200, "what there is room for, and the one that filled it"
        assert len(ledger.buffer) == 60
        await ledger.close()

    writer: Any = None
    asyncio.run(test())


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    """Reason and count of each line about trajectories that were dropped."""
    fields = [getattr(r, "fields", {}) for r in caplog.records if r.message == "trajectories dropped"]
    caplog.clear()
    return [(f["reason"], f["count"]) for f in fields]


def test_what_is_dropped_is_said_where_it_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the log, in the report of the next update, in the status with what to do, and to whoever brought it."""
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        settings = config(tmp_path, max_staleness=1, trajectory_buffer_size=8)
        async with running(settings, start=False) as side:
            learner = side.learner
            assert learner.status().advice.startswith("No answer was collected so far")
            assert await learner.add([t for n in (1, 2) for t in group(n)], 2) == frozenset()
            assert (await learner.update()).dropped == {}
            await learner.add([*group(3), *group(4), *group(5)], 2)
            assert (await learner.update()).version == 3
            await learner.add(group(6, version=2), 2)
            assert learner.is_stale((3, 1)) and not learner.is_stale((3, 2))
            assert await learner.add([*group(7), *group(8, version=2)], 2) == {"t7-0", "t7-1"}, "two versions behind"
            assert logged(caplog) == [("stale", 2)]
            assert learner.status().buffered == 4, "the others are taken"
            report = await learner.update()
            assert (report.outcome, report.trajectories, report.dropped) == ("published", 4, {"stale": 2})
            await learner.add(group(9, version=3), 2)
            for number in (10, 11):  # two versions from what was posted
                assert (await learner.update(group(number, version=4))).dropped == {}
            report = await learner.update()
            assert (report.outcome, report.dropped) == ("skipped", {"stale": 2})
            assert "2 stale" in report.reason
            assert logged(caplog) == [("stale", 2)], "they were too old when it was their turn"
            assert learner.status().dropped_stale == 4
            await learner.add([t for n in range(20, 25) for t in group(n, version=6)], 2)
            assert logged(caplog) == [("overflow", 2)]
            advice = learner.status().advice
            assert advice.startswith("4 trajectories were not learned from because the versions that made them")
            for words in (
                "max_staleness = 1",
                "ask for policy",
                "2 trajectories were not learned from because the buffer",
            ):
                assert words in advice
        async with running(settings, start=False) as side:
            status = side.learner.status()
            assert (status.dropped_stale, status.advice) == (4, advice), "restarts do not forget"

    asyncio.run(test())


@on_a_loop
async def test_of_what_is_posted_every_trajectory_is_learned_from_or_told_why_not(tmp_path: Path) -> None:
    async with running(config(tmp_path, max_staleness=2), start=False) as side:
        update = side.learner.update
        for number in (1, 2, 3):
            assert (await update(group(number))).dropped_at == {}
        posted = [*group(4, version=4), *group(1), *group(5, rewards=(1.0, 1.0), version=4), *group(6), *group(7)[:1]]
        posted[-1] = Trajectory("alone", "g7", (1,), (9,), (), (), (), 1.0, 1.0, external=True)
        report = await update(posted)
        assert report.outcome == "published" and report.trajectories == 2
        assert report.dropped_at == {"duplicate": (2, 3), "stale": (6, 7), "equal_rewards": (4, 5, 8)}
        assert (report.dropped, report.skipped_groups) == ({"stale": 2, "duplicate": 2}, 2)
        assert side.learner.status().trajectories_collected == 6 + 5, "what is new, and not too old"
        assert side.learner.history[-1].dropped_at == {}, "thousands of positions are for who asked"
        again = await update(posted[4:6])
        assert (again.outcome, again.dropped_at) == ("skipped", {"equal_rewards": (0, 1)}), "it may be brought again"
        twin = Trajectory("t5-1", "g5", (1,), (9,), (), (), (4,), 1.0, 0.0, external=True)
        assert (await update([posted[4], twin])).outcome == "published", "with other rewards"


@on_a_loop
async def test_whoever_asks_for_a_checkpoint_or_the_base_is_learned_from_however_old_they_are(tmp_path: Path) -> None:
    """Wherever age decides: when answers come, when they are taken, and when somebody brings them."""
    ledger = Ledger(config(tmp_path, trajectory_buffer_size=99, max_staleness=2))
    await ledger.open(nothing)
    ledger.listed = [CheckpointInfo("c", 9, 3, "d", 0.0, None, False, False, 1)]
    made = [
        trajectory(10 * version + i, f"g{version}", float(i), version) for version in (0, 3, 4, 7, 8) for i in (0, 1)
    ]
    assert [ledger.is_stale(t.versions, 10) for t in made[::2]] == [False, False, True, True, False]
    accepted = ledger.accept(made, 10)
    assert [g[0].group for g in accepted.groups] == ["g0", "g3", "g8"] and accepted.dropped == {"stale": [4, 5, 6, 7]}
    await ledger.add([(t, 2) for t in made])
    assert [g[0].group for g in ledger.take(99, 10)] == ["g0", "g3", "g8"]
    assert ledger.buffer.counts.dropped_stale == 4 + 4
    await ledger.close()


@pytest.mark.parametrize(
    ("differences", "outcome", "afresh"),
    [(60, "rolled_back", True), (60, "published", False), (2, "rolled_back", False)],
)
def test_what_is_shown_to_be_worse_and_taken_back_is_compared_afresh(
    tmp_path: Path, differences: int, outcome: str, *, afresh: bool
) -> None:
    """By the next process, too, which would take back again what is gone already."""

    async def test() -> None:
        settings = config(tmp_path)
        ledger = Ledger(settings)
        await ledger.open(nothing)
        worse = settings.rl_training.guard_false_rollback
        for _ in range(differences):
            ledger.compared(-1.0, 0.0)
        assert ledger.counters.trial.is_worse(worse) == (differences > 2)
        ledger.begin(Pending(Began(1, (), (), AdamParams(0.0), 0), ()))
        ledger.end(Ended(1, outcome))
        for _ in range(2):
            trial = ledger.counters.trial
            assert trial.comparison.count == (0 if afresh else differences)
            assert trial.is_worse(worse) == (differences > 2 and not afresh)
            await ledger.flush()
            await ledger.close()
            ledger = Ledger(settings)
            await ledger.open(nothing)
        await ledger.close()

    asyncio.run(test())


@pytest.mark.parametrize("is_full", [True, False])
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_comparison_counts_once_whenever_the_process_ends(tmp_path: Path, restarts: int, *, is_full: bool) -> None:
    """The database and the checkpoint that was made both have it, also when the drive is full after the checkpoint."""

    async def opened() -> Ledger:
        ledger = Ledger(config(tmp_path))
        await ledger.open(nothing)
        return ledger

    async def write(folder: str) -> None:
        (Path(folder) / "adapter").write_bytes(b"x")

    async def test() -> None:
        ledger = await opened()
        for number in range(2 + restarts):
            if number == 2:
                await ledger.close()
                ledger = await opened()
            ledger.compared(1.0, 0.0)
            await ledger.flush()
        assert ledger.counters.trial.comparison.count == 2 + restarts
        save = ledger.save(Manifest(name="c", step=0, version=0, digest="d"), write)
        if is_full:
            with full_drive():
                with pytest.raises(StorageError):
                    await save
                ledger.checkpoints.close()
                ledger.shared.close()
        else:
            await save
            await ledger.close()
        for _ in range(2):
            ledger = await opened()
            assert ledger.counters.trial.comparison.count == 2 + restarts
            await ledger.close()

    asyncio.run(test())


@pytest.mark.promise("FLT-56")
@on_a_loop
async def test_a_folder_that_was_removed_and_made_again_is_the_second_server_s(tmp_path: Path) -> None:
    """What the first one does not write is neither acknowledged nor written over what the second one has."""
    folder = tmp_path / "checkpoints"
    first = Ledger(config(folder))
    await first.open(nothing)
    await first.add([(trajectory(1, "a", 0.0, 1), 2)])
    assert await first.folder.error() == ""
    files.remove_tree(folder)
    assert "was removed or replaced" in await first.folder.error()
    second = Ledger(config(folder))
    await second.open(nothing)
    await second.add([(trajectory(2, "b", 0.0, 1), 2)])
    with pytest.raises(StorageError, match="was removed or replaced"):
        await first.add([(trajectory(3, "c", 0.0, 1), 2)])
    with pytest.raises(StorageError, match="was removed or replaced"):
        first.checkpoints.new("checkpoint-1")
    await second.close()
    third = Ledger(config(folder))
    await third.open(nothing)
    assert [t.id for t, _ in third.buffer.held] == ["t2"]
    await third.close()
