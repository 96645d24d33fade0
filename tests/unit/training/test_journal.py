"""The journal gives back exactly what was acknowledged, or says where it is damaged; never anything else."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem import files
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig
from mlx_tandem.files import StorageError
from mlx_tandem.training.store import journal as module
from mlx_tandem.training.store import records
from mlx_tandem.training.store.journal import Journal
from mlx_tandem.training.store.records import Added, Began, Dropped, Ended, Opened, Record, Seen
from mlx_tandem.training.trajectories import Buffer, Trajectory
from tests.faulty import FaultFiles, ForgetfulFiles

SLOW = settings(max_examples=40)


def trajectory(id: str, group: str = "g", reward: float = 0.1) -> Trajectory:
    return Trajectory(id, group, (1, 2), (3,), (-0.1,), (-1 / 3,), (7,), 0.7, reward, metadata={"answer": "4"})


DATUM = Datum((1, 2, 3), 2, (0.1 + 0.2,), (-1 / 3,), 0.7)
BEGAN = Began(8, ("a", "b"), (Batch("policy", (DATUM,), LossConfig("ppo", clip_high=0.28)),), AdamParams(1e-5), 512)

RECORDS = st.lists(
    st.one_of(
        st.builds(
            Added, st.builds(trajectory, st.text(max_size=8), reward=st.floats(allow_nan=False)), st.integers(0, 9)
        ),
        st.just(BEGAN),
        st.builds(Ended, st.integers(0, 99), st.sampled_from(["published", "kept"]), st.text(max_size=4)),
        st.builds(Dropped, st.lists(st.text(max_size=3), max_size=3).map(tuple)),
    ),
    max_size=6,
)
BATCHES = st.lists(RECORDS.filter(len), min_size=1, max_size=4)
HEAD: list[Record] = [Opened(records.FORMAT, "", 0, 0), Seen(())]


def on_a_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


def write(folder: Path, batches: list[list[Record]]) -> tuple[Path, list[int]]:
    """A journal with one write for each of `batches`: its file, and how long that was after each write."""

    async def run() -> tuple[Path, list[int]]:
        journal, _ = Journal.open(folder)
        sizes = [journal.size]
        for batch in batches:
            for record in batch:
                journal.append(record)
            await journal.flush()
            sizes.append(journal.size)
        await journal.close()
        return journal.path, sizes

    return asyncio.run(run())


async def read_again(folder: Path) -> list[Record]:
    journal, found = Journal.open(folder)
    await journal.close()
    return list(found)


def reopened(folder: Path) -> list[Record]:
    return asyncio.run(read_again(folder))


def flat(batches: list[list[Record]]) -> list[Record]:
    return HEAD + [r for b in batches for r in b]


@SLOW
@given(BATCHES)
def test_what_was_flushed_is_there_however_often_it_is_read(batches: list[list[Record]]):
    with tempfile.TemporaryDirectory() as d:
        folder = Path(d) / "journal"
        path, sizes = write(folder, batches)
        before = path.read_bytes()
        assert len(before) == sizes[-1]
        assert reopened(folder) == reopened(folder) == flat(batches)
        assert path.read_bytes() == before, "reading changes nothing"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.promise("FLT-32")
@SLOW
@given(BATCHES, st.data())
def test_any_truncation_leaves_a_prefix(batches: list[list[Record]], data: st.DataObject):
    """All writes that are whole, and of the torn one its whole records. What comes next is appended after them."""
    with tempfile.TemporaryDirectory() as d:
        path, sizes = write(Path(d), batches)
        size = data.draw(st.integers(0, sizes[-1]))
        os.truncate(path, size)
        if size < sizes[0]:
            with pytest.raises(StorageError, match=f"{path.name} is damaged at byte"):
                Journal.open(Path(d))
            assert path.stat().st_size == size, "nothing is changed"
            return
        found = reopened(Path(d))
        assert found == flat(batches)[: len(found)]
        acknowledged = sum(s <= size for s in sizes[1:])
        assert len(found) >= len(flat(batches[:acknowledged]))
        write(Path(d), [[BEGAN]])
        assert reopened(Path(d)) == [*found, BEGAN]


@SLOW
@given(BATCHES, st.data())
def test_any_flipped_bit_is_found(batches: list[list[Record]], data: st.DataObject):
    """In the last write it is a torn tail, cut off; anywhere else an error that names file and place."""
    with tempfile.TemporaryDirectory() as d:
        path, sizes = write(Path(d), batches)
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        if sizes[0] <= at and sizes[-2] <= at:
            found = reopened(Path(d))
            assert found == flat(batches)[: len(found)] and len(found) < len(flat(batches))
            assert len(found) >= len(flat(batches[:-1]))
        else:
            with pytest.raises(StorageError, match=f"{path.name} is damaged at byte") as e:
                Journal.open(Path(d))
            assert "move it away" in e.value.message
            assert path.read_bytes() == content


@SLOW
@given(BATCHES, st.data())
def test_pages_of_the_last_write_may_be_lost_in_any_order(batches: list[list[Record]], data: st.DataObject):
    with tempfile.TemporaryDirectory() as d:
        path, sizes = write(Path(d), batches)
        content = bytearray(path.read_bytes())
        a = data.draw(st.integers(sizes[-2], sizes[-1] - 1))
        b = data.draw(st.integers(a, sizes[-1]))
        content[a:b] = bytes(b - a)
        path.write_bytes(content)
        found = reopened(Path(d))
        assert found == flat(batches)[: len(found)]
        assert len(found) >= len(flat(batches[:-1]))


def test_a_record_that_is_not_in_its_place_is_found(tmp_path: Path):
    path, sizes = write(tmp_path, [[Dropped(("a",))], [Dropped(("b",))], [Dropped(("c",))]])
    content = path.read_bytes()
    one, two = content[sizes[0] : sizes[1]], content[sizes[1] : sizes[2]]
    path.write_bytes(content[: sizes[0]] + two + one + content[sizes[2] :])
    with pytest.raises(StorageError, match=f"at byte {sizes[0]}:"):
        Journal.open(tmp_path)
    path.write_bytes(content)
    path.rename(path.with_name("journal-000002.log"))
    with pytest.raises(StorageError, match="damaged"):
        Journal.open(tmp_path)


@pytest.mark.promise("FLT-34")
def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as m:
        m.setattr(records, "FORMAT", 2)
        write(tmp_path, [])
    with pytest.raises(StorageError, match="another version of mlx-tandem") as e:
        Journal.open(tmp_path)
    assert e.value.code == "unknown_format"


def test_an_update_comes_back_bit_for_bit(tmp_path: Path):
    write(tmp_path, [[BEGAN]])
    found = reopened(tmp_path)[-1]
    assert isinstance(found, Began) and found == BEGAN
    assert found.batches[0].data[0].weights[0].hex() == (0.1 + 0.2).hex()


@on_a_loop
async def test_waiters_share_a_sync(tmp_path: Path):
    journal, _ = Journal.open(tmp_path, ops := FaultFiles())

    async def one(i: int) -> None:
        journal.append(Dropped((str(i),)))
        await journal.flush()

    before = ops.calls
    await asyncio.gather(*(one(i) for i in range(50)))
    many = ops.calls - before
    await one(50)
    assert many <= 30, "few writes for many waiters"
    assert [r.ids[0] for r in await journal.replay() if isinstance(r, Dropped)] == [str(i) for i in range(51)]
    await journal.close()
    await journal.close()


@on_a_loop
async def test_a_waiter_that_gives_up_stops_nobody(tmp_path: Path):
    journal, _ = Journal.open(tmp_path)
    journal.append(Dropped(("a",)))
    first = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    journal.append(Dropped(("b",)))
    second = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert len(await read_again(tmp_path)) == 4
    await journal.close()


@on_a_loop
async def test_rotation(tmp_path: Path):
    """The new file has the checkpoint, what waits, what was seen, and what was appended meanwhile; the old one goes."""
    journal, old = Journal.open(tmp_path)
    buffer = Buffer(10)
    for i in range(6):
        t = trajectory(f"t{i}", f"g{i // 2}", float(i % 2))
        buffer.add(t, 2)
        journal.append(Added(t, 2))
    await journal.flush()
    journal.append(Dropped(("x",)))
    buffer.take(2, 7, 0)
    rotation = asyncio.create_task(journal.rotate("checkpoint-8", 8, buffer.held, buffer.seen))
    await asyncio.sleep(0)
    journal.append(Dropped(("late",)))
    await asyncio.gather(rotation, journal.flush())
    path = journal.path
    assert [p.name for p in tmp_path.iterdir()] == [path.name] == ["journal-000002.log"]
    again = Buffer(10)
    opened, *found = await read_again(tmp_path)
    assert opened == Opened(records.FORMAT, "checkpoint-8", 8, 4)
    for record in found[:4]:
        assert isinstance(record, Added) and again.add(record.trajectory, record.size)
    assert isinstance(found[4], Seen)
    again.remember(found[4].ids)
    assert (again.held, again.seen) == (buffer.held, buffer.seen)
    assert found[5:] == [Dropped(("late",))]
    assert len(old) == 2 and isinstance(old[0], Opened), "what was read before can still be read"
    await journal.close()


@pytest.mark.promise("FLT-56")
@on_a_loop
async def test_nothing_is_acknowledged_once_the_file_is_gone(tmp_path: Path):
    """It is written when the folder is back, and is whole then."""
    folder, elsewhere = tmp_path / "journal", tmp_path / "elsewhere"
    journal, _ = Journal.open(folder)
    journal.append(Dropped(("a",)))
    await journal.flush()
    folder.rename(elsewhere)
    for _ in range(2):
        journal.append(Dropped(("b",)))
        with pytest.raises(StorageError, match="was removed or replaced"):
            await journal.flush()
    other, _ = Journal.open(folder)
    with pytest.raises(StorageError, match="was removed or replaced"):
        await journal.flush()
    with pytest.raises(StorageError, match="was removed or replaced"):
        await journal.rotate("checkpoint-8", 8, (), ())
    assert [p.name for p in folder.iterdir()] == [other.path.name], "nothing was done to another's folder"
    await other.close()
    files.remove_tree(folder)
    elsewhere.rename(folder)
    await journal.flush()
    await journal.close()
    assert (await read_again(folder))[2:] == [Dropped(("a",)), Dropped(("b",)), Dropped(("b",))]


@on_a_loop
async def test_nothing_is_acknowledged_once_the_lock_is_lost(tmp_path: Path):
    held = True
    journal, _ = Journal.open(tmp_path, held=lambda: held)
    journal.append(Dropped(("a",)))
    await journal.flush()
    held = False
    journal.append(Dropped(("b",)))
    with pytest.raises(StorageError, match="was removed or replaced"):
        await journal.flush()


@on_a_loop
async def test_a_file_that_is_set_aside_stays(tmp_path: Path):
    journal, _ = Journal.open(tmp_path)
    journal.append(Dropped(("a",)))
    await journal.flush()
    kept, content = journal.set_aside(), journal.path.read_bytes()
    assert journal.set_aside() == kept, "a second time changes nothing"
    await journal.rotate("checkpoint-8", 8, (), ())
    await journal.close()
    again, _ = Journal.open(tmp_path)
    await again.close()
    assert kept.read_bytes() == content
    assert again.path != kept


@on_a_loop
async def test_what_comes_while_a_rotation_waits_for_a_write_is_in_the_new_file(tmp_path: Path):
    journal, _ = Journal.open(tmp_path)
    journal.append(Dropped(("old",)))
    writing = asyncio.create_task(journal.flush())
    await asyncio.sleep(0)
    assert journal._work is not None, "a write is under way"
    rotation = asyncio.create_task(journal.rotate("checkpoint-8", 8, (), ()))
    await asyncio.sleep(0)
    journal.append(Dropped(("late",)))
    await asyncio.gather(writing, rotation, journal.flush())
    await journal.close()
    assert (await read_again(tmp_path))[-1] == Dropped(("late",))


@on_a_loop
async def test_what_a_killed_process_has_written_is_on_the_drive_once_it_has_been_read(tmp_path: Path):
    """It may have been in memory only, and what follows from it is about to be done."""
    ops = ForgetfulFiles()
    journal, _ = Journal.open(tmp_path, ops)
    journal.append(Dropped(("a",)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "sync", lambda fd: None)
        await journal.flush()
    again, _ = Journal.open(tmp_path, ops)
    ops.lose_power()
    assert await read_again(tmp_path) == [*HEAD, Dropped(("a",))]
    await journal.close()
    await again.close()


@on_a_loop
async def test_what_waits_and_what_is_there_is_counted_also_while_a_file_begins_again(tmp_path: Path):
    """Checkpoints say how many records they came after, and nothing is collected while too much waits."""
    journal, _ = Journal.open(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BEHIND", 100)
        for number in range(9):
            journal.append(Dropped((f"before {number:090}",)))
        assert journal.is_behind and journal.count == len(HEAD) + 9
        held = [(trajectory(str(number)), 0) for number in range(3)]
        rotation = asyncio.create_task(journal.rotate("c", 1, held, ("x",)))
        await asyncio.sleep(0)
        journal.append(Dropped(("late",)))
        await rotation
        assert not journal.is_behind and journal.count == 1 + 3 + 1 + 1
        await journal.flush()
        assert (journal._waiting, journal.count, len(await journal.replay())) == (0, 6, 6)
        for number in range(2):
            journal.append(Dropped((f"after {number:090}",)))
        assert journal.is_behind
        await journal.flush()
        assert not journal.is_behind and journal.count == 8
    await journal.close()


@on_a_loop
async def test_a_file_begins_again_once_it_has_grown_by_much_of_what_it_began_with(tmp_path: Path):
    """A buffer that is large is not written again for every few trajectories."""
    journal, _ = Journal.open(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LARGE", 1000)
        while journal.size <= 1000:
            assert not journal.is_large
            journal.append(Added(trajectory("a")))
            await journal.flush()
        assert journal.is_large
        await journal.rotate("c", 1, [(trajectory(str(number)), 0) for number in range(20)], ())
        begun = journal.size
        assert begun > 1000 and not journal.is_large
        while journal.size <= 4 * begun:
            assert not journal.is_large
            for _ in range(10):
                journal.append(Added(trajectory("a")))
            await journal.flush()
        assert journal.is_large
    await journal.close()


@pytest.mark.parametrize("rotate", [False, True])
def test_what_was_acknowledged_survives_a_loss_of_power(tmp_path: Path, rotate: bool):
    ops = ForgetfulFiles()

    async def run() -> None:
        journal, _ = Journal.open(tmp_path / "journal", ops)
        journal.append(Dropped(("a",)))
        await (journal.rotate("c", 1, [], ("a",)) if rotate else journal.flush())
        journal.append(Dropped(("b",)))
        await journal.flush()
        ops.lose_power()

    asyncio.run(run())
    ids = [r.ids for r in reopened(tmp_path / "journal") if isinstance(r, Dropped | Seen)]
    assert ids == ([("a",), ("b",)] if rotate else [(), ("a",), ("b",)])


@pytest.mark.parametrize("renamed", [False, True])
@pytest.mark.parametrize("repeat", [1, 3])
def test_any_file_operation_may_fail(tmp_path: Path, renamed: bool, repeat: int):
    """Whatever fails: what was acknowledged is there after a restart, in order and once, and nothing that was not
    appended. While the process lives, a later flush acknowledges what an earlier one could not."""

    async def run(folder: Path, ops: FaultFiles) -> tuple[list[str], bool]:
        acknowledged: list[str] = []
        buffer = Buffer(100)
        rotated = False
        try:
            journal, _ = Journal.open(folder, ops)
        except StorageError:
            return [], False
        for i in range(6):
            t = trajectory(str(i))
            buffer.add(t)
            journal.append(Added(t))
            try:
                if i == 3:
                    await journal.rotate("c", 1, buffer.held, ())
                    rotated = True
                else:
                    await journal.flush()
                acknowledged = [t.id for t, _ in buffer.held]
            except StorageError:
                pass
        try:
            await journal.close()
            acknowledged = [t.id for t, _ in buffer.held]
        except StorageError:
            pass
        return acknowledged, rotated

    fail_at, done = 0, False
    while not done:
        fail_at += 1
        folder = tmp_path / str(fail_at)
        ops = FaultFiles(fail_at, repeat=repeat, renamed=renamed)
        acknowledged, rotated = asyncio.run(run(folder, ops))
        done = not ops.failed
        found = reopened(folder)
        ids = [r.trajectory.id for r in found if isinstance(r, Added)]
        assert ids == [str(i) for i in range(len(ids))] and len(ids) >= len(acknowledged), fail_at
        assert len(acknowledged) in (0, 6) or repeat > 1, "one failure is got over"
        assert not rotated or (isinstance(found[0], Opened) and found[0].checkpoint == "c")
    assert len(acknowledged) == 6 and fail_at > 20
