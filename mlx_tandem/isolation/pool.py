"""Several worker processes of one program behind one bounded queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from mlx_tandem.errors import EngineError, Overloaded
from mlx_tandem.isolation.process import Lost, Program, WorkerProcess

A = TypeVar("A")

MOST_AT_ONCE = 8
"""Most items that a worker is given in one frame, which costs fewer calls of the kernel than a frame for each. An item
that costs its worker delays the items behind it in the frame.
"""

MOST_BYTES_AT_ONCE = 1 << 16
"""Most bytes of the items in one frame; a larger item has a frame of its own."""

SHARE_OF_NEWEST = 0.1
"""Weight of the newest item in the moving average of seconds."""


@dataclass(frozen=True)
class Bounds:
    """Limits of what may wait for a worker or be worked on at once; more is refused."""

    items: int
    bytes: int
    seconds: float
    """Time after which an item that still waits is refused."""


@dataclass(eq=False, slots=True)
class _Waiting(Generic[A]):
    """An item that waits for its turn, and the future that its answer goes to."""

    item: bytes
    future: asyncio.Future[A | Lost]
    has_begun: bool = False  # whether a worker is at it

    def set(self, answer: A | Lost) -> None:
        """Set the answer unless the caller has left."""
        if not self.future.done():
            self.future.set_result(answer)


class WorkerPool(Generic[A]):
    """Workers that answer single items, each item by one worker. It belongs to one event loop.

    No process is started before the first item. A worker that was lost is started again while other items wait, so
    that only the item that it was lost over, and those in the same frame, are delayed.
    """

    def __init__(self, name: str, program: Program[A], workers: int, bounds: Bounds):
        """Make a pool of `workers` workers; `name` says in errors what they are for."""
        self._name = name
        self._bounds = bounds
        self._workers = [WorkerProcess(program) for _ in range(workers)]
        self._idle = self._workers.copy()  # the last one is used next, so that workers already started are preferred
        self._waiting: deque[_Waiting[A]] = deque()
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
        loop = asyncio.get_running_loop()
        waiting = _Waiting[A](item, loop.create_future())
        if not self._waiting:
            loop.call_soon(self._give_out)  # together with what else is asked until then
        self._waiting.append(waiting)
        refusal = loop.call_later(self._bounds.seconds, self._refuse, waiting)
        try:
            answer = await waiting.future
        finally:
            refusal.cancel()
            self._items -= 1
            self._bytes -= len(item)
        if isinstance(answer, Lost) and not answer.started:
            raise EngineError(f"the process for {self._name} could not be started")
        return answer

    async def close(self) -> None:
        """End all workers, whatever they do; items that still wait raise EngineError."""
        for worker in self._workers:
            worker.close()
        self._give_out()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for worker in self._workers:
            await worker.stop()

    def _give_out(self) -> None:
        """Divide the items that wait among the idle workers."""
        while self._idle and self._waiting:
            items = self._next_frame(min(-(-len(self._waiting) // len(self._idle)), MOST_AT_ONCE))
            if items:
                self._begin(self._answer(self._idle.pop(), items))

    def _next_frame(self, most: int) -> list[_Waiting[A]]:
        """Take up to `most` items from the queue for one frame, without those that were refused or whose callers left.

        The result is empty only when no other item waits.
        """
        items: list[_Waiting[A]] = []
        size = 0
        while self._waiting and len(items) < most:
            waiting = self._waiting[0]
            if not waiting.future.done():
                size += len(waiting.item)
                if items and size > MOST_BYTES_AT_ONCE:
                    break
                items.append(waiting)
            self._waiting.popleft()
        return items

    def _refuse(self, waiting: _Waiting[A]) -> None:
        """Refuse an item if no worker has begun with it. One that lies in a worker's frame is answered for nobody."""
        if not waiting.has_begun and not waiting.future.done():
            waiting.future.set_exception(self._refusal(503))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)  # the event loop itself does not keep a task alive
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, worker: WorkerProcess[A], items: list[_Waiting[A]]) -> None:
        """Let a worker answer these items. A caller who leaves meanwhile does not end it."""
        began = monotonic()
        items[0].has_begun = True
        left = deque(items)

        def answered(answer: A | Lost) -> None:
            left.popleft().set(answer)
            if left:
                left[0].has_begun = True

        answers = await worker.ask([waiting.item for waiting in items], answered)
        seconds = (monotonic() - began) / len(items)
        self._seconds_per_item += SHARE_OF_NEWEST * (seconds - self._seconds_per_item)
        if isinstance(answers[-1], Lost) and answers[-1].started:
            await worker.start()
        self._idle.append(worker)
        self._give_out()

    def _refusal(self, status: int) -> Overloaded:
        wait = self._items * self._seconds_per_item / len(self._workers)
        return Overloaded(f"too much waits for {self._name}", retry_after=wait, status=status)
