"""The files and batches of one server, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mlx_tandem import limits
from mlx_tandem.config import Config
from mlx_tandem.dialects.batches.records import Batch, FileRecord
from mlx_tandem.dialects.batches.runner import BatchRun, Post, Surroundings
from mlx_tandem.dialects.batches.store import BatchStore
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import Conflict, EngineUnavailable, NotFound, QuotaExceeded
from mlx_tandem.files import StorageError
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.request_admission import RequestAdmission
from mlx_tandem.log import log, log_exception

T = TypeVar("T")

QUOTA = "batch_quota_exceeded"
"""The code of errors about too many files or batches."""

LOOK_SECONDS = 60.0
"""Longest time between two looks at files that expire."""

ROOMY, FULL = 0.6, 0.9
"""Shares of the memory pressure threshold: from the first on no request of a batch begins, and from the second on those
that run are put back."""


class Batches:
    """The files and batches of one server, on the front's event loop. Batches run one after the other.

    The folder is taken when the first file comes, or at the start if it has anything in it. `post` is set by the
    server before the first batch runs.
    """

    def __init__(
        self,
        config: Config,
        client: EngineClient,
        admission: RequestAdmission,
        clock: Callable[[], float] = time.time,
    ):
        """Begin without touching the drive. `clock` returns seconds since 1970."""
        self.post: Post | None = None
        self._server, self._client, self._admission, self._clock = config.server, client, admission, clock
        self._folder = Path(config.batches.dir)
        self._most_bytes = int(config.batches.max_gb * 1e9)
        self._store: BatchStore | None = None
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()  # between looking whether something may be done, and doing it
        self._wake = asyncio.Event()
        self._run: BatchRun | None = None
        self._task: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run batches, and go on with those of an earlier process; a second call does nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """End the batch that runs, which goes on at the next start, and give the folder back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        async with self._opening:
            if self._store is not None:
                await asyncio.to_thread(self._store.close)
                self._store = None

    async def _work(self) -> None:
        """Run the oldest batch that has not ended, and the next ones after it, for ever."""
        if BatchStore.exists(self._folder):
            try:
                await self._opened()
            except StorageError as e:
                log("batches do not go on", logging.WARNING, error=e.message)
        while True:
            self._wake.clear()
            try:
                again = self._store is not None and await self._next(self._store)
            except StorageError as e:
                log("batches wait for the drive", logging.WARNING, error=e.message)
                again = False
            except Exception as e:
                log_exception("batches do not go on", e)
                again = False
            if not again:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)

    async def _next(self, store: BatchStore) -> bool:
        """Remove expired files that no batch needs, and run the oldest batch that has not ended; return False if there
        is none.
        """
        async with self._turn:
            waiting = await asyncio.to_thread(store.unfinished)
            needed = {batch.input for batch in waiting}
            for record in await asyncio.to_thread(store.files):
                if self._has_expired(record) and record.id not in needed:
                    await asyncio.to_thread(store.remove_file, record.id)
        if not waiting or self.post is None:
            return False
        self._run = BatchRun(waiting[0], Surroundings(store, self.post, self._room, self._clock, self._most_bytes))
        try:
            await self._run.run()
        except StorageError:
            raise
        except Exception as e:  # the batches behind it go on
            log_exception("a batch failed", e)
            await self._run.fail()
        finally:
            self._run = None
        return True

    def _room(self) -> int:
        """Return how many requests of batches may run now: none while the engine is not there.

        None begin either while much of the cache is used, and one has to go, which is -1, before users are refused.
        """
        info, server = self._client.info, self._server
        if self._client.state not in ("ready", "idle") or info is None:
            return 0
        pressure = self._admission.utilization / server.memory_pressure_threshold
        if pressure >= ROOMY:
            return -1 if pressure >= FULL else 0
        most = min(info.max_num_seqs, limits.MAX_BATCH_REQUESTS)
        return min(most, max(server.max_concurrent_requests // 2, 1)) if server.max_concurrent_requests else most

    async def _opened(self) -> BatchStore:
        """Return the open folder. Raises StorageError."""
        async with self._opening:
            if self._store is None:
                if self._client.state == "draining":
                    raise EngineUnavailable("the server is shutting down")
                self._store = await asyncio.to_thread(BatchStore, self._folder)
            return self._store

    async def _known(self) -> BatchStore | None:
        """Return the open folder; None if nothing was ever kept in it."""
        return await self._opened() if self._store is not None or BatchStore.exists(self._folder) else None

    # -- files --------------------------------------------------------------------------------------------------

    async def add_file(self, record: FileRecord, content: bytes) -> None:
        """Keep a file. Raises QuotaExceeded where there are too many, and StorageError."""
        store = await self._opened()
        async with self._turn:
            number, size = await asyncio.to_thread(store.used)
            if number >= limits.MAX_BATCH_FILES or size + record.size > self._most_bytes:
                raise QuotaExceeded(
                    f"the files of batches are {number} of {limits.MAX_BATCH_FILES} and take {size / 1e9:.3f} of "
                    f"{self._most_bytes / 1e9:g} GB (batches.max_gb): delete some",
                    code=QUOTA,
                )
            await asyncio.to_thread(store.add_file, record, content)

    async def files(self) -> list[FileRecord]:
        """Return all files, the newest first. Raises StorageError."""
        store = await self._known()
        found = [] if store is None else await asyncio.to_thread(store.files)
        there = (record for record in found if not self._has_expired(record))
        return [record for record in there if CALLER.get().sees(record.owner)]

    async def file(self, id: str, param: str = "file_id") -> FileRecord:
        """Return what is known of a file. Raises NotFound naming `param`."""
        store = await self._known()
        found = None if store is None else await asyncio.to_thread(store.file, id)
        if found is None or not CALLER.get().sees(found.owner) or self._has_expired(found):
            raise NotFound(f"there is no file {id[:80]!r}", param=param, code="file_not_found")
        return found

    def _has_expired(self, record: FileRecord) -> bool:
        """Return whether a file is removed at the next look."""
        return record.expires is not None and record.expires <= self._clock()

    async def path(self, id: str) -> Path:
        """Return the place of a file. Raises NotFound."""
        await self.file(id)
        return (await self._opened()).path(id)

    async def remove_file(self, id: str) -> None:
        """Remove a file. Raises NotFound, and Conflict for the requests of a batch that has not ended."""
        await self.file(id)
        store = await self._opened()
        async with self._turn:
            for batch in await asyncio.to_thread(store.unfinished):
                if batch.input == id:
                    raise Conflict(
                        f"the file is that of {batch.id}, which has not ended: cancel it first", param="file_id"
                    )
            await asyncio.to_thread(store.remove_file, id)

    # -- batches ------------------------------------------------------------------------------------------------

    async def create(self, batch: Batch) -> Batch:
        """Keep a batch, which runs when those before it have ended. Raises NotFound and QuotaExceeded."""
        await self.file(batch.input, "input_file_id")
        store = await self._opened()
        async with self._turn:
            await self.file(batch.input, "input_file_id")  # it may have been removed before this turn
            if len(await asyncio.to_thread(store.unfinished)) >= limits.MAX_OPEN_BATCHES:
                raise QuotaExceeded(
                    f"{limits.MAX_OPEN_BATCHES} batches have not ended: cancel one, or wait", code=QUOTA
                )
            await asyncio.to_thread(store.put, batch)
        self._wake.set()
        return batch

    async def batch(self, id: str) -> Batch:
        """Return a batch. Raises NotFound."""
        store = await self._known()
        if self._run is not None and self._run.batch.id == id:
            found: Batch | None = self._run.batch
        else:
            found = None if store is None else await asyncio.to_thread(store.batch, id)
        if found is None or not CALLER.get().sees(found.owner):
            raise NotFound(f"there is no batch {id[:80]!r}", param="batch_id", code="batch_not_found")
        return found

    async def batches(self, after: str | None, limit: int) -> list[Batch]:
        """Return the next batches after the one with the id `after`, or the first of all, the newest first."""
        store = await self._known()
        owner = None if "admin" in CALLER.get().scopes else CALLER.get().tenant
        return [] if store is None else await asyncio.to_thread(store.page, after, limit, owner)

    async def cancel(self, id: str) -> Batch:
        """Cancel a batch: what runs is ended, and answers are kept. Raises NotFound, and Conflict at its end."""
        async with self._turn:
            batch = await self.batch(id)
            if batch.has_ended:
                raise Conflict(f"the batch is {batch.status}: it can no longer be cancelled", param="batch_id")
            if batch.status != "cancelling":
                batch.enter("cancelling", self._clock())
                await asyncio.to_thread((await self._opened()).put, batch)
            if self._run is not None:
                self._run.look()
            return batch
