"""The database as the front of a server uses it, which may learn or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from mlx_tandem import files
from mlx_tandem.errors import EngineUnavailable
from mlx_tandem.training.store.database import NAME, Database


class DatabaseOnUse:
    """The database of one server. On a server that learns it is that of the learner.

    Elsewhere the database is opened, and its folder taken, when something is kept for the first time. It belongs to one
    event loop.
    """

    def __init__(self, folder: Path, shared: Callable[[], Database | None] | None = None):
        """Begin without touching the drive. `shared` returns the learner's database, or None before it is open."""
        self.folder = folder
        self._shared = shared
        self._own: Database | None = None
        self._lock: files.FolderLock | None = None
        self._turn = asyncio.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether it is that of a learner."""
        return self._shared is not None

    @property
    def exists(self) -> bool:
        """Whether there may be anything in it."""
        return self.is_shared or self._own is not None or (self.folder / NAME).exists()

    async def open(self) -> Database:
        """Return the open database. Raises StorageError, and EngineUnavailable while the learner's is not open."""
        if self._shared is not None:
            found = self._shared()
            if found is None:
                raise EngineUnavailable("learning has not started yet")
            return found
        async with self._turn:
            if self._own is None:
                self._own = await asyncio.to_thread(self._open)
            return self._own

    async def close(self) -> None:
        """Close the database if it was opened here."""
        async with self._turn:
            if self._own is not None:
                await asyncio.to_thread(self._own.close)
            if self._lock is not None:
                self._lock.release()
            self._own = self._lock = None

    def _open(self) -> Database:
        """Take the folder and open its database. Raises StorageError."""
        with files.storage(self.folder):
            files.make_folder(self.folder)
            lock = files.FolderLock(self.folder)
        try:
            database = Database.open(self.folder, lock.held)
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        return database
