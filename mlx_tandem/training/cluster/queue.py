"""Trajectories that wait on the drive until another machine has them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from mlx_tandem.log import log
from mlx_tandem.training.cluster.wire import MOST_BODY, MOST_ITEMS, Item
from mlx_tandem.training.store.database import Database
from mlx_tandem.training.store.records import Broken, seal, unseal
from mlx_tandem.training.trajectories import Trajectory

NAME = "trajectories.db"

MIGRATIONS = (
    """
    CREATE TABLE items (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        id TEXT NOT NULL UNIQUE,
        size INTEGER NOT NULL,              -- of its group; 0: unknown
        bytes INTEGER NOT NULL,             -- of the body
        taker TEXT NOT NULL DEFAULT '',     -- the machine that has it, perhaps; '': nobody
        body BLOB NOT NULL                  -- the trajectory, sealed
    );
    CREATE TABLE queue (id TEXT NOT NULL);  -- whose numbers these are
    INSERT INTO queue VALUES (lower(hex(randomblob(8))));
    """,
)

MOST_BYTES = 256 << 20
"""Most bytes of all trajectories that wait."""


class Queue:
    """The queue in one folder, which this process holds. The oldest trajectories go when there are too many."""

    def __init__(self, folder: Path, capacity: int, held: Callable[[], bool]):
        """Prepare the queue for at most `capacity` trajectories; `open` comes first."""
        self._folder, self._capacity, self._held = folder, capacity, held
        self._database: Database | None = None
        self._arrived = asyncio.Event()
        self._reading = asyncio.Lock()
        self.id = ""
        """The id of this queue. Numbers of trajectories have a meaning only together with it."""
        self.dropped = 0
        """Trajectories that went for lack of room since the start."""
        self.waiting = 0
        """Trajectories that wait now."""

    async def open(self) -> None:
        """Open the file; a second call does nothing. Raises StorageError."""
        if self._database is not None:
            return

        def opened() -> Database:
            return Database.open(self._folder, self._held, name=NAME, migrations=MIGRATIONS)

        self._database = await asyncio.to_thread(opened)
        self.waiting = await asyncio.to_thread(self._count)
        self.id = str((await asyncio.to_thread(self._database.rows, "SELECT id FROM queue"))[0][0])

    async def close(self) -> None:
        """Close the file, and let nobody wait any longer."""
        self._arrived.set()
        if self._database is not None:
            await asyncio.to_thread(self._database.close)

    async def put(self, items: Sequence[Item]) -> None:
        """Take trajectories, which are on the drive when this returns. An id that waits already is left out.

        Raises StorageError.
        """
        async with self._reading:
            await asyncio.to_thread(self._put, items)
        self._arrived.set()

    async def get(self, after: int, most: int, wait: float = 0.0, taker: str = "") -> tuple[Item, ...]:
        """Return the oldest trajectories with numbers above `after`, at most `most`. They are for `taker` from then on.

        Where there are none, wait for some for `wait` seconds. Raises StorageError.
        """
        self._arrived.clear()  # before looking, so that nothing that comes in between is missed
        found = await self._look(after, most, taker)
        if not found and most and wait:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._arrived.wait()
            found = await self._look(after, most, taker)
        return found

    async def _look(self, after: int, most: int, taker: str) -> tuple[Item, ...]:
        async with self._reading:
            if self._file.is_closed:  # while somebody waited
                return ()
            return await asyncio.to_thread(self._get, after, min(most, MOST_ITEMS), taker)

    async def remove(self, through: int, taker: str = "") -> None:
        """Remove the trajectories of `taker` with numbers up to `through`, which it has. Raises StorageError."""
        async with self._reading:
            await asyncio.to_thread(self._remove, through, taker)

    async def free(self, takers: Collection[str]) -> None:
        """Make the trajectories of machines that are not among `takers` available to all again. Raises StorageError."""
        marks = ", ".join("?" * len(takers))
        statement = f"UPDATE items SET taker = '' WHERE taker NOT IN ({marks})"
        async with self._reading:
            await asyncio.to_thread(self._file.write, [(statement, tuple(takers))])
        self._arrived.set()

    # On threads, one at a time.

    @property
    def _file(self) -> Database:
        assert self._database is not None
        return self._database

    def _count(self) -> int:
        return int(self._file.rows("SELECT count(*) FROM items")[0][0])

    def _put(self, items: Sequence[Item]) -> None:
        sealed = [(item, seal(item.trajectory)) for item in items]
        insert = "INSERT OR IGNORE INTO items (id, size, bytes, body) VALUES (?, ?, ?, ?)"
        self._file.write([(insert, (i.trajectory.id, i.size, len(body), body)) for i, body in sealed])
        self._shrink()
        self.waiting = self._count()

    def _shrink(self) -> None:
        """Remove the oldest trajectories while there are too many, or too many bytes. The newest one always stays."""
        count, total = self._file.rows("SELECT count(*), total(bytes) FROM items")[0]
        if count <= self._capacity and total <= MOST_BYTES:
            return
        sizes = [size for (size,) in self._file.rows("SELECT bytes FROM items ORDER BY number DESC")]
        there, fit = len(sizes), sum(total <= MOST_BYTES for total in accumulate(sizes))
        keep = min(there, self._capacity, max(fit, 1))
        oldest = "SELECT number FROM items ORDER BY number LIMIT ?"
        self._file.write([(f"DELETE FROM items WHERE number IN ({oldest})", (there - keep,))])
        self.dropped += there - keep
        log("trajectories dropped for lack of room", logging.WARNING, dropped=there - keep)

    def _get(self, after: int, most: int, taker: str) -> tuple[Item, ...]:
        found: list[Item] = []
        total = 0
        where = "number > ? AND taker IN ('', ?)"
        query = f"SELECT number, size, body FROM items WHERE {where} ORDER BY number LIMIT ?"
        for number, size, body in self._file.rows(query, after, taker, most):
            try:
                item = Item(unseal(body, Trajectory), size, number)
            except Broken as e:
                log("a trajectory is damaged", logging.WARNING, number=number, error=str(e))
                self._file.write([("DELETE FROM items WHERE number = ?", (number,))])
                continue
            total += len(msgspec.json.encode(item)) + 1
            if found and total > MOST_BODY:
                break
            found.append(item)
        if found and taker:
            mark = "UPDATE items SET taker = ? WHERE number = ?"
            self._file.write([(mark, (taker, item.number)) for item in found])
        return tuple(found)

    def _remove(self, through: int, taker: str) -> None:
        self._file.write([("DELETE FROM items WHERE number <= ? AND taker = ?", (through, taker))])
        self.waiting = self._count()
