"""The database gives back exactly what was acknowledged, or says that it is damaged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem import files
from mlx_tandem.engine.learning import AdamParams, Batch, Datum, LossConfig
from mlx_tandem.files import StorageError
from mlx_tandem.training.store import database as module
from mlx_tandem.training.store import schema
from mlx_tandem.training.store.database import NAME, Database, Statement, Writer
from mlx_tandem.training.store.records import Began, Ended
from mlx_tandem.training.store.rows import MOST_PAST, MOST_UPDATES, Rows
from mlx_tandem.training.store.saved import Saved
from mlx_tandem.training.trajectories import Counts, Trajectory
from tests.unit.online_side import on_a_loop

ROWS = Rows("policy")
DATUM = Datum((1, 2, 3), 2, (0.1 + 0.2,), (-1 / 3,), 0.7)
BEGAN = Began(8, ("a", "b"), (Batch("policy", (DATUM,), LossConfig("ppo", clip_high=0.28)),), AdamParams(1e-5), 512)


def trajectory(id: str) -> Trajectory:
    return Trajectory(id, "g", (1, 2), (3,) * 200, (-0.1,), (-1 / 3,), (7,), 0.7, 0.1, metadata={"answer": "4"})


def wait(number: int) -> Statement:
    return ROWS.waiting(trajectory(f"t{number}"), number, 0, number)


def summary() -> Statement:
    return ROWS.run(Counts(), 5.0)


def ids(folder: Path) -> list[str]:
    """The trajectories that a process which comes next finds."""
    database = Database.open(folder)
    found = [each.trajectory.id for each in Saved(database, "policy").waiting()]
    database.close()
    return found


def written(folder: Path, count: int) -> tuple[Path, list[int]]:
    """A database whose process has ended suddenly after `count` transactions: the folder as it was then, and how long
    the log was after each.
    """
    database = Database.open(folder / "live")
    sizes = []
    for number in range(1, count + 1):
        database.write([wait(number)])
        sizes.append((folder / "live" / f"{NAME}-wal").stat().st_size)
    shutil.copytree(folder / "live", folder / "left")
    database.close()
    return folder / "left", sizes


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    folder = tmp_path_factory.mktemp("left")
    (folder / "live").mkdir()
    return written(folder, 6)


def test_everything_is_synced_and_for_the_user_alone(tmp_path: Path) -> None:
    """Power losses are SQLite's business, as long as it is told to sync each transaction, on macOS to the medium."""
    database = Database.open(tmp_path)
    for pragma, value in (("synchronous", 2), ("fullfsync", 1), ("checkpoint_fullfsync", 1), ("journal_mode", "wal")):
        assert database.rows(f"PRAGMA {pragma}") == [(value,)]
    database.write([wait(1)])
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    database.close()
    database.close()
    with pytest.raises(StorageError):
        database.write([wait(2)])


@pytest.mark.promise("FLT-32")
@settings(max_examples=40)
@given(st.data())
def test_a_log_that_was_cut_anywhere_has_all_transactions_before(
    left: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """And of the one that was cut nothing; what comes next is written after them."""
    source, sizes = left
    folder = tmp_path_factory.mktemp("cut") / "copy"
    shutil.copytree(source, folder)
    size = data.draw(st.integers(sizes[0], sizes[-1]))
    os.truncate(folder / f"{NAME}-wal", size)
    found = ids(folder)
    assert found == [f"t{number + 1}" for number in range(len(found))]
    assert len(found) == sum(each <= size for each in sizes)
    database = Database.open(folder)
    database.write([wait(9)])
    database.close()
    assert ids(folder) == [*found, "t9"]


def test_a_damaged_file_is_refused_with_what_to_do(left: tuple[Path, list[int]], tmp_path: Path) -> None:
    """A page that is no page, a file that is no database, and a row whose bytes are others. Nothing is changed."""
    for at, name in ((0, "header"), (4096, "page"), (-1, "row")):
        folder = tmp_path / name
        shutil.copytree(left[0], folder)
        ids(folder)  # moves the log into the file
        content = bytearray((folder / NAME).read_bytes())
        at = content.rindex(b"\x03" * 50) if at < 0 else at
        content[at : at + 40] = b"\xff" * 40
        (folder / NAME).write_bytes(content)
        with pytest.raises(
            StorageError, match=f"{NAME} is damaged: .*move the three away to begin with the newest"
        ) as e:
            ids(folder)
        assert e.value.code == "store_damaged"
        assert (folder / NAME).read_bytes() == content


@pytest.mark.promise("FLT-34")
def test_tables_of_older_versions_are_brought_forward_and_newer_ones_refused(tmp_path: Path) -> None:
    database = Database.open(tmp_path)
    database.write([wait(1)])
    database.close()
    later = (*schema.MIGRATIONS, "CREATE TABLE remarks (id TEXT); ALTER TABLE runs ADD COLUMN note TEXT;")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIGRATIONS", (*later, "CREATE TABLE broken (id TEXT); NOT SQL;"))
        with pytest.raises(StorageError, match="has older tables: start a server"):
            Database.read_only(tmp_path)
        with pytest.raises(StorageError, match="syntax error"):
            Database.open(tmp_path)
        patch.setattr(module, "MIGRATIONS", later)
        database = Database.open(tmp_path)  # the first of the two was whole
        database.write([("INSERT INTO remarks VALUES (?)", ("f",))])
        database.close()
        assert ids(tmp_path) == ["t1"]
    for opens in (Database.open, Database.read_only):
        with pytest.raises(StorageError, match="newer version of mlx-tandem") as e:
            opens(tmp_path)
        assert e.value.code == "unknown_format"


def test_a_transaction_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    database = Database.open(tmp_path)
    database.write([wait(1)])
    with pytest.raises(StorageError, match="no such table: elsewhere"):
        database.write([wait(2), ("INSERT INTO elsewhere VALUES (1)", ()), wait(3)])
    database.write([wait(4)])
    database.close()
    assert ids(tmp_path) == ["t1", "t4"]


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """No file of this process becomes longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("kind", ["file", "database"])
def test_a_full_drive_loses_nothing_that_was_acknowledged(tmp_path: Path, kind: str) -> None:
    """A flush that fails acknowledges nothing; the next one writes what it could not, once and in order."""

    async def run() -> None:
        database = Database.open(tmp_path)
        writer = Writer(database, summary)
        writer.put(wait(1))
        await writer.flush()
        with contextlib.ExitStack() as stack:
            if kind == "file":
                stack.enter_context(room((tmp_path / f"{NAME}-wal").stat().st_size + 5000))
            else:
                database.rows(f"PRAGMA max_page_count = {database.rows('PRAGMA page_count')[0][0]}")
            with pytest.raises(StorageError, match=f"{NAME} cannot be used: (disk I/O error|database or disk is full)"):
                for number in range(2, 40):
                    writer.put(wait(number))
                    await writer.flush()
            held = ids(tmp_path) if kind == "database" else []
            writer.put(wait(number + 1))
            with pytest.raises(StorageError):
                await writer.flush()
            assert writer.waiting_bytes > 0
        if kind == "database":
            assert held == [f"t{n}" for n in range(1, number)]
            database.rows("PRAGMA max_page_count = 1000000")
        await writer.flush()
        assert writer.waiting_bytes == 0
        await writer.close()
        database.close()
        assert ids(tmp_path) == [f"t{n}" for n in range(1, number + 2)]

    asyncio.run(run())


@on_a_loop
async def test_waiters_share_a_transaction_and_one_that_gives_up_stops_nobody(tmp_path: Path) -> None:
    database = Database.open(tmp_path)
    writer, writes = Writer(database, summary), []
    original = database.write

    def write(statements: list[Statement]) -> None:
        writes.append(statements)
        original(statements)

    database.write = write  # type: ignore[method-assign,assignment]

    async def one(number: int) -> None:
        writer.put(wait(number))
        await writer.flush()

    tasks = [asyncio.create_task(one(number)) for number in range(1, 51)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(writes) <= 2 and all(statements[-1] == summary() for statements in writes)
    await writer.close()
    database.close()
    assert ids(tmp_path) == [f"t{number}" for number in range(1, 51)]


@on_a_loop
async def test_a_read_beside_a_write_sees_whole_transactions_and_stops_nobody(tmp_path: Path) -> None:
    database = Database.open(tmp_path)
    database.write([wait(1), wait(2)])
    reader = Database.read_only(tmp_path)
    rows = reader.each("SELECT id FROM trajectories")
    assert next(rows) == ("t1",)
    database.write([wait(3)])
    assert [*rows] == [("t2",)]
    with pytest.raises(StorageError, match="readonly"):
        reader.write([wait(4)])
    reader.close()
    database.close()
    assert Database.read_only(tmp_path).rows("SELECT count(*) FROM trajectories") == [(3,)], "no server runs"


@pytest.mark.promise("FLT-56")
def test_nothing_is_acknowledged_once_the_file_is_gone_or_the_lock_is_lost(tmp_path: Path) -> None:
    """What could not be written is written when the folder is back."""
    folder, elsewhere, held = tmp_path / "learns", tmp_path / "elsewhere", True
    folder.mkdir()
    database = Database.open(folder, lambda: held)
    database.write([wait(1)])
    folder.rename(elsewhere)
    for _ in range(2):
        with pytest.raises(StorageError, match="was removed or replaced"):
            database.write([wait(2)])
    folder.mkdir()
    other = Database.open(folder)
    with pytest.raises(StorageError, match="was removed or replaced"):
        database.write([wait(2)])
    assert list(Saved(other, "policy").waiting()) == []
    other.close()
    files.remove_tree(folder)
    elsewhere.rename(folder)
    held = False
    with pytest.raises(StorageError, match="was removed or replaced"):
        database.write([wait(2)])
    held = True
    database.write([wait(2)])
    database.close()
    assert ids(folder) == ["t1", "t2"]


def test_an_update_comes_back_bit_for_bit_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    """Of what was learned from, too."""
    database = Database.open(tmp_path)
    database.write([ROWS.began(1, BEGAN)])
    found = Saved(database, "policy").pending()
    assert found == BEGAN
    assert found.batches[0].data[0].weights[0].hex() == (0.1 + 0.2).hex()
    statements: list[Statement] = []
    for number in range(1, MOST_UPDATES + 5):
        statements.append(ROWS.learned(f"t{number}", number, number, trajectory(f"t{number}")))
        outcome = "published" if number == 2 else "refused"
        statements += [*ROWS.ended(number, Ended(number, outcome), Counts(taken=number)), ROWS.prune(number)]
    for _ in range(2):  # a transaction may be repeated
        database.write(statements)
    assert Saved(database, "policy").pending() is None
    numbers = [number for number, _ in Saved(database, "policy").reports()]
    assert numbers == list(range(5, MOST_UPDATES + 5))
    kept = database.rows("SELECT min(position), count(*) FROM trajectories WHERE body IS NOT NULL")
    assert kept == [(5, MOST_PAST)]
    database.close()


def test_adapters_have_rows_of_their_own(tmp_path: Path) -> None:
    database, other = Database.open(tmp_path), Rows("other")
    database.write([wait(1), other.waiting(trajectory("t1"), 1, 0, 1), other.run(Counts(taken=3), 1.0), summary()])
    database.write([other.gone("t1", 2, "stale"), other.began(1, BEGAN), *other.states([], 1)])
    assert [w.trajectory.id for w in Saved(database, "policy").waiting()] == ["t1"]
    assert list(Saved(database, "other").waiting()) == [] and Saved(database, "policy").pending() is None
    assert Saved(database, "other").run(Counts) == Counts(taken=3) and Saved(database, "policy").run(Counts) == Counts()
    database.close()
