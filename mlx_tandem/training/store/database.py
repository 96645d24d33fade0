"""`learning.db`: the SQLite database that one process writes. A transaction that has returned is on the drive."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mlx_tandem import files
from mlx_tandem.files import StorageError
from mlx_tandem.training.store.schema import MIGRATIONS

NAME = "learning.db"

BEHIND = 64 << 20
"""Bytes that may wait in memory for a drive that takes none, before nothing more is collected."""

BUSY_SECONDS = 10.0
"""The time for which a write waits for a program that reads the file."""

PRAGMAS = ("synchronous = FULL", "fullfsync = 1", "checkpoint_fullfsync = 1")
"""FULL syncs every transaction; the others make that a sync of the medium on macOS, where it stops at a cache else."""

WAL_BYTES = 16 << 20
"""Bytes that the write-ahead log is cut to once its content has moved into the database."""

Statement = tuple[str, tuple[Any, ...]]
"""One statement of SQL and its values. Repeating a transaction of them changes nothing."""


class Database:
    """The connection of the one process that holds the folder's lock. Every call may wait for the drive."""

    def __init__(self, path: Path, connection: sqlite3.Connection, held: Callable[[], bool]) -> None:
        self.path = path
        self.is_closed = False
        self._connection, self._held = connection, held
        self._identity = os.stat(path)
        self._lock = threading.Lock()

    @staticmethod
    def open(
        folder: Path,
        held: Callable[[], bool] = lambda: True,
        *,
        name: str = NAME,
        migrations: Sequence[str] | None = None,
    ) -> Database:
        """Return the database in `folder`, made or brought to this version's tables where that is needed.

        `held` returns whether this process still has the folder's lock. `migrations` are those of the file `name`; by
        default those of learning.
        Raises StorageError when the file is damaged, or was written by a newer version.
        """
        path = folder.resolve() / name
        with files.storage(path):
            if not path.exists():
                files.create(path, b"")
                files.sync_folder(path.parent)
        with _errors(path):
            connection = sqlite3.connect(path, BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            try:
                for pragma in (*PRAGMAS, "journal_mode = WAL", f"journal_size_limit = {WAL_BYTES}"):
                    connection.execute(f"PRAGMA {pragma}")
                _check_whole(path, connection)
                _migrate(path, connection, MIGRATIONS if migrations is None else migrations)
                return Database(path, connection, held)
            except BaseException:
                connection.close()
                raise

    @staticmethod
    def read_only(folder: Path) -> Database:
        """Return the database in `folder`, for reading beside the process that writes it. Raises StorageError."""
        path = folder.resolve() / NAME
        if not path.is_file():
            raise StorageError(f"there is no {path}: no server has learned with this folder")
        with _errors(path):
            connection = _reading(path)
            try:
                if _version(connection) < len(MIGRATIONS):
                    raise StorageError(
                        f"{path} has older tables: start a server with this folder once, which renews them"
                    )
                _check_version(path, connection, MIGRATIONS)
            except BaseException:
                connection.close()
                raise
        return Database(path, connection, lambda: True)

    @staticmethod
    def holds(folder: Path, table: str) -> bool:
        """Return whether the database in `folder` has a row in `table`, beside the process that writes it.

        There need not be a database, and one of an older version need not have the table. Raises StorageError.
        """
        path = folder.resolve() / NAME
        if not path.is_file():
            return False
        with _errors(path), contextlib.closing(_reading(path)) as connection:
            known = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,))
            return bool(known.fetchall() and connection.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall())

    def write(self, statements: Sequence[Statement]) -> None:
        """Execute all statements, or none: when this returns they survive a crash or a loss of power.

        Raises StorageError, also when the file is no longer there under its name or the lock is lost.
        """
        with self._lock, _errors(self.path):
            self.check()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for sql, values in statements:
                    self._connection.execute(sql, values)
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
            self.check()

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows that a query finds. Raises StorageError."""
        with self._lock, _errors(self.path):
            return self._connection.execute(sql, values).fetchall()

    def each(self, sql: str, *values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield the rows that a query finds, without having all of them in memory. Raises StorageError."""
        with _errors(self.path):
            yield from self._connection.execute(sql, values)

    def check(self) -> None:
        """Raise StorageError unless the file is still there under its name and no other process may write to it.

        A file that somebody has removed takes everything that is written to it, and nobody will find it there.
        """
        with files.storage(self.path):
            try:
                same = os.path.samestat(os.stat(self.path), self._identity)
            except (FileNotFoundError, NotADirectoryError):
                same = False
        if not (same and self._held()):
            raise StorageError(
                f"{self.path} was removed or replaced while it was in use, so nothing more is kept: "
                "bring the folder back as it was, or restart the server"
            )

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self.is_closed = True
            with contextlib.suppress(
                sqlite3.Error
            ):  # what could not be moved out of the log is moved at the next start
                self._connection.close()


class Writer:
    """Puts statements into transactions. `put` is cheap; `flush` makes all before it durable, with one sync for many.

    Belongs to one event loop; the file is written on threads. After a failed write nothing is lost: what was not
    acknowledged stays in memory and is written with the next flush. `summary` is called for each transaction, in whose
    end it stands: what it says is as new as the statements.
    """

    def __init__(self, database: Database, summary: Callable[[], Statement]) -> None:
        self._database, self._summary = database, summary
        self._pending: deque[tuple[Statement, ...]] = deque()
        self._put = 0  # groups of statements so far; the last of them are in _pending
        self._work: asyncio.Task[None] | None = None

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the blobs that wait for the drive."""
        return sum(len(v) for group in self._pending for _, values in group for v in values if isinstance(v, bytes))

    @property
    def is_behind(self) -> bool:
        """Whether so much waits for the drive that nothing more should be put before a `flush` has returned."""
        return self.waiting_bytes > BEHIND

    async def room(self) -> None:
        """Wait until the drive is no longer behind. Raises StorageError while it takes nothing.

        Of several that waited, each one looks again: what the first puts may be all that there is room for.
        """
        while self.is_behind:
            await self.flush()

    def put(self, *statements: Statement) -> None:
        """Put statements, of which all are in one transaction; none: the summary alone has changed."""
        self._pending.append(statements)
        self._put += 1

    async def flush(self) -> None:
        """Wait until everything put before is on the drive. Raises StorageError when it is not."""
        target = self._put
        while self._put - len(self._pending) < target:
            if self._work is None:
                await self._alone(self._write())
            else:
                await asyncio.wait([self._work])

    async def close(self) -> None:
        """Make what was put durable, or raise StorageError; either way nothing is written afterwards."""
        try:
            self.put()
            await self.flush()
        finally:
            while self._work is not None:
                await asyncio.wait([self._work])

    async def _write(self) -> None:
        groups = list(self._pending)
        statements = [statement for group in groups for statement in group]
        await asyncio.to_thread(self._database.write, [*statements, self._summary()])
        for _ in groups:
            self._pending.popleft()

    async def _alone(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` while nothing else writes; a caller that is cancelled does not stop it half way."""

        def done(task: asyncio.Task[None]) -> None:
            self._work = None
            if not task.cancelled():
                task.exception()  # nobody may be left who waits for it

        self._work = task = asyncio.ensure_future(work)
        task.add_done_callback(done)
        await asyncio.wait([task])
        task.result()


def _reading(path: Path) -> sqlite3.Connection:
    """Return a connection that only reads."""
    return sqlite3.connect(f"file:{quote(str(path))}?mode=ro", BUSY_SECONDS, uri=True)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Raise an error of SQLite inside the block as StorageError about `path`."""
    try:
        yield
    except sqlite3.Error as e:
        name = getattr(e, "sqlite_errorname", "")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise damaged(path, str(e)) from e
        raise StorageError(f"{path} cannot be used: {e}") from e


def damaged(path: Path, what: str) -> StorageError:
    """Return the error of a database that is not as it was written, which says what to do."""
    return StorageError(
        f"{path} is damaged: {what}. Restore it, with {path.name}-wal and {path.name}-shm beside it, from a copy, or "
        "move the three away to begin with the newest checkpoint and no trajectories",
        code="store_damaged",
    )


def _check_whole(path: Path, connection: sqlite3.Connection) -> None:
    found = [str(row[0]) for row in connection.execute("PRAGMA quick_check(1)")]
    if found != ["ok"]:
        raise damaged(path, "; ".join(found)[:300])


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _check_version(path: Path, connection: sqlite3.Connection, migrations: Sequence[str]) -> None:
    version = _version(connection)
    if version > len(migrations):
        raise StorageError(
            f"{path} was written by a newer version of mlx-tandem (tables of version {version}; this one knows "
            f"{len(migrations)}): use that version, or another folder",
            code="unknown_format",
        )


def _migrate(path: Path, connection: sqlite3.Connection, migrations: Sequence[str]) -> None:
    """Bring the tables to this version's, each migration whole or not at all."""
    _check_version(path, connection, migrations)
    for number in range(_version(connection), len(migrations)):
        script = f"BEGIN IMMEDIATE; {migrations[number]} PRAGMA user_version = {number + 1}; COMMIT;"
        connection.executescript(script)
