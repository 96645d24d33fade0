"""The database of a folder, in which the adapters of one server learn."""

from __future__ import annotations

import threading
from pathlib import Path

from mlx_tandem import files
from mlx_tandem.files import FolderLock
from mlx_tandem.training.store.database import Database


class SharedDatabase:
    """The database of one folder, which several ledgers use. The first that opens it takes the folder's lock, and the
    last that closes it gives it back. Calls may come from any thread, and may wait for the drive.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.lock: FolderLock | None = None
        """The lock of the folder; None while nobody has the database open."""
        self._database: Database | None = None
        self._users = 0
        self._mutex = threading.Lock()

    def open(self) -> Database:
        """Return the database. Raises StorageError, above all when another process has the folder."""
        with self._mutex:
            if self._database is None:
                with files.storage(self.folder):
                    files.make_folder(self.folder)
                    self.lock = FolderLock(self.folder)
                try:
                    self._database = Database.open(self.folder, self._held)
                except BaseException:
                    self._release()
                    raise
            self._users += 1
            return self._database

    def close(self) -> None:
        """Give up one use; the last one closes the file. Does nothing if there is none."""
        with self._mutex:
            if not self._users:
                return
            self._users -= 1
            if not self._users and self._database is not None:
                self._database.close()
                self._database = None
                self._release()

    def _held(self) -> bool:
        """Return whether the folder is still the one that was locked."""
        return self.lock is not None and self.lock.held()

    def _release(self) -> None:
        if self.lock is not None:
            self.lock.release()
            self.lock = None
