"""Several worker processes of one program behind one bounded queue."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from mlx_tandem.errors import EngineError, Overloaded
from mlx_tandem.isolation.process import Lost, Program, WorkerProcess

A = TypeVar("A")
T = TypeVar("T")

SHARE_OF_NEWEST = 0.1
"""Weight of the newest item in the moving average of seconds."""


@dataclass(frozen=True)
class Bounds:
    """Limits of what may wait for a worker or be worked on at once; more is refused."""

    items: int
    bytes: int
    seconds: float
    """Time after which an item that still waits is refused."""


class WorkerPool(Generic[A]):
    """Workers that answer single items, each item by one worker. It belongs to one event loop.

    No process is started before the first item. A worker that was lost is started again while other items wait, so
    that only the item that it was lost over is delayed.
    """

    def __init__(self, name: str, program: Program[A], workers: int, bounds: Bounds):
        """Make a pool of `workers` workers; `name` says in errors what they are for."""
        self._name = name
        self._bounds = bounds
        self._workers = [WorkerProcess(program) for _ in range(workers)]
        self._idle = self._workers.copy()  # the last one is used next, so that workers already started are preferred
        self._free = asyncio.Semaphore(workers)
        self._items = 0
        self._bytes = 0
        self._seconds_per_item = 0.0  # moving average
        self._tasks: set[asyncio.Task[Any]] = set()

    async def ask(self, item: bytes) -> A | Lost:
        """Return the answer to `item`, or Lost if the worker ended over it.

        Raises:
            Overloaded: Too much waits already (status 429), or the item has waited for too long (503).
            EngineError: No worker can be started.
        """
        if self._items >= self._bounds.items or (self._items and self._bytes + len(item) > self._bounds.bytes):
            raise self._refusal(429)
        self._items += 1
        self._bytes += len(item)
        try:
            await self._turn()
            # A caller who leaves now must not end the worker: the next item would have to wait for a new one to start.
            answer = await asyncio.shield(self._begin(self._answer(item)))
        finally:
            self._items -= 1
            self._bytes -= len(item)
        if isinstance(answer, Lost) and not answer.started:
            raise EngineError(f"the process for {self._name} could not be started")
        return answer

    async def close(self) -> None:
        """End all workers, whatever they do; items that still wait raise EngineError."""
        for worker in self._workers:
            worker.close()
        for _ in self._workers:
            await self._free.acquire()
        for worker in self._workers:
            await worker.stop()
            self._free.release()

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._bounds.seconds):
                await self._free.acquire()
        except TimeoutError:
            raise self._refusal(503) from None

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself does not keep a task alive
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, item: bytes) -> A | Lost:
        worker = self._idle.pop()
        began = monotonic()
        (answer,) = await worker.ask([item])
        self._seconds_per_item += SHARE_OF_NEWEST * (monotonic() - began - self._seconds_per_item)
        if isinstance(answer, Lost) and answer.started:
            self._begin(self._restart(worker))
        else:
            self._put_back(worker)
        return answer

    async def _restart(self, worker: WorkerProcess[A]) -> None:
        await worker.start()
        self._put_back(worker)

    def _put_back(self, worker: WorkerProcess[A]) -> None:
        self._idle.append(worker)
        self._free.release()

    def _refusal(self, status: int) -> Overloaded:
        wait = self._items * self._seconds_per_item / len(self._workers)
        return Overloaded(f"too much waits for {self._name}", retry_after=wait, status=status)
