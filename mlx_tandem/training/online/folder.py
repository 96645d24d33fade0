"""Looking whether the folders of checkpoints and database are still there."""

from __future__ import annotations

import asyncio

from mlx_tandem.files import StorageError
from mlx_tandem.training.store.checkpoints import Checkpoints, gone
from mlx_tandem.training.store.database import Database

LOOK_SECONDS = 0.2
"""Most seconds for which somebody waits for a look at the drive."""


class Folder:
    """The folders of a database, which is None until it has been opened, and of checkpoints. Belongs to one event
    loop.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.database: Database | None = None
        self._checkpoints = checkpoints
        self._look: asyncio.Task[None] | None = None
        self._error = ""  # by the last look

    async def error(self) -> str:
        """Return what is wrong with the folders; empty: nothing.

        While the drive does not answer, the result is that of the last look which it has answered.
        """
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._check())
        await asyncio.wait({self._look}, timeout=LOOK_SECONDS)
        return self._error

    async def _check(self) -> None:
        database, error = self.database, ""
        if database is not None and not database.is_closed:
            try:
                await asyncio.to_thread(database.check)
                if not await asyncio.to_thread(self._checkpoints.held):
                    raise gone(self._checkpoints.folder)
            except StorageError as e:
                error = "" if database.is_closed else e.message
        self._error = error
