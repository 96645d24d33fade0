"""Runs one batch: its requests are answered in the lowest class of service, and each outcome is kept once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from msgspec import structs

from mlx_tandem.dialects.batches import lines
from mlx_tandem.dialects.batches.lines import LinePlace, LineReply
from mlx_tandem.dialects.batches.records import Batch, FileRecord, LineOutcome, Problem, Status, new_id
from mlx_tandem.dialects.batches.store import BatchStore
from mlx_tandem.files import StorageError
from mlx_tandem.generation.prompted import BACKGROUND
from mlx_tandem.log import log

Post = Callable[[str, bytes, str], Awaitable[LineReply]]
"""Answers a request to a path with this JSON body, as one over HTTP with the key of this name is answered."""

TICK_SECONDS = 0.25
"""Longest time between two checks of how many requests may run."""

MOST_PAUSE = 30.0
"""Longest pause, in seconds, after a request that has to be sent again, or after a write to the drive that failed."""

LATER = frozenset({429, 503, 504})
"""Statuses of replies to requests that can be sent again."""

MOST_DEATHS = 3
"""A request during which the engine has ended so often is answered with that error."""


class Surroundings(NamedTuple):
    """The surroundings of a batch: what it needs to run."""

    store: BatchStore
    post: Post
    room: Callable[[], int]  # how many requests may run now; negative: one of those that run has to go
    clock: Callable[[], float]  # seconds since 1970
    most_bytes: int  # of all files and outcomes


class BatchRun:
    """One batch that runs, on the front's event loop."""

    def __init__(self, batch: Batch, around: Surroundings):
        """Prepare to run a batch from its beginning, or from where an earlier process has left it."""
        self.batch = batch
        self._around = around
        self._path = around.store.path(batch.input)
        self._places: list[LinePlace] = []
        self._todo: deque[int] = deque()
        self._running: dict[asyncio.Task[LineOutcome | None], int] = {}
        self._deaths: Counter[int] = Counter()
        self._wake = asyncio.Event()
        self._pause = 0.0  # seconds; grows with each request that has to be sent again
        self._bytes = 0  # of all files and outcomes, about
        self._over = False  # whether all files and outcomes take more than `most_bytes`

    def look(self) -> None:
        """Have `run` check at once whether the batch goes on."""
        self._wake.set()

    async def run(self) -> None:
        """Run the batch to its end. When the task is cancelled, it goes on at the next start."""
        try:
            if not await self._validated():
                return
            while (self._todo or self._running) and self._ending() is None:
                self._start()
                await self._step()
        finally:
            await self._stop()
        await self._end(self._ending() or "completed")

    # -- before -------------------------------------------------------------------------------------------------

    async def _validated(self) -> bool:
        """Read the requests, and note which have an outcome; return False after ending a batch that cannot run."""
        batch, store = self.batch, self._around.store
        self._places, problems = await asyncio.to_thread(lines.checked, self._path, batch.endpoint)
        if problems:
            batch.problems = tuple(problems)
            batch.enter("failed", self._around.clock())
            await self._written(lambda: store.put(batch))
            return False
        done = await asyncio.to_thread(store.done, batch.id)
        self._todo = deque(n for n in range(len(self._places)) if n not in done)
        self._bytes = (await asyncio.to_thread(store.used))[1]
        self._over = self._bytes > self._around.most_bytes
        batch.total, batch.completed = len(self._places), sum(done.values())
        batch.failed = len(done) - batch.completed
        if batch.status == "validating":
            batch.enter("in_progress", self._around.clock())
        await self._written(lambda: store.put(batch))
        return True

    def _ending(self) -> Status | None:
        """Return the state in which the batch ends before all requests are answered; None: it goes on."""
        if self.batch.status == "cancelling":
            return "cancelled"
        if self._over:
            return "failed"
        return "expired" if self._around.clock() >= self.batch.expires else None

    # -- requests -----------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin requests while there is room, and put the newest one back if the others have to make room."""
        room = self._around.room()
        if room < 0 and self._running:
            task, number = self._running.popitem()
            task.cancel()
            self._todo.appendleft(number)
        while not self._pause and self._todo and len(self._running) < room:
            number = self._todo.popleft()
            self._running[asyncio.create_task(self._answered(number))] = number

    async def _step(self) -> None:
        """Wait until a request has ended, or it is time to look again, and keep the outcomes."""
        waking = asyncio.create_task(self._wake.wait())
        pause, self._pause = self._pause, 0.0
        left = max(self.batch.expires - self._around.clock(), 0.0)
        try:
            if pause:
                await asyncio.wait({waking}, timeout=min(pause, left))
            else:
                watched: set[asyncio.Task[Any]] = {waking, *self._running}
                await asyncio.wait(watched, timeout=min(TICK_SECONDS, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waking.cancel()
            self._wake.clear()
        ended = [task for task in self._running if task.done()]
        outcomes: list[LineOutcome] = []
        for task in ended:
            number = self._running.pop(task)
            outcome = task.result()
            if outcome is None:
                self._todo.appendleft(number)
                self._pause = min(max(2 * pause, 4 * TICK_SECONDS), MOST_PAUSE)
            else:
                outcomes.append(outcome)
        if outcomes:
            await self._keep(outcomes)

    async def _keep(self, outcomes: list[LineOutcome]) -> None:
        """Keep outcomes, and count them."""
        self.batch.completed += sum(o.succeeded for o in outcomes)
        self.batch.failed += sum(not o.succeeded for o in outcomes)
        await self._written(lambda: self._around.store.add(self.batch, outcomes))
        self._bytes += sum(len(o.text) for o in outcomes)
        self._over = self._bytes > self._around.most_bytes

    async def _answered(self, number: int) -> LineOutcome | None:
        """Return the outcome of a request; None if it has to be sent again."""
        BACKGROUND.set(True)  # for this task only
        line = lines.read(await asyncio.to_thread(lines.read_at, self._path, self._places[number]))
        # The same JSON as in the line: a number that is none, or too large, stays what it is, and is refused.
        body = json.dumps(line.body, ensure_ascii=False).encode()
        answer = await self._around.post(line.url, body, self.batch.key)
        if answer.status in LATER:
            self._deaths[number] += b'"engine_died"' in answer.body
            if self._deaths[number] < MOST_DEATHS:
                return None
        return lines.answered(number, line.custom_id, answer)

    async def _stop(self) -> None:
        """End the requests that run. They have no outcome."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._todo.extend(self._running.values())
        self._running.clear()

    # -- after --------------------------------------------------------------------------------------------------

    async def fail(self) -> None:
        """End a batch that cannot go on for a reason that only the log has. What was answered is kept."""
        self.batch.problems = (Problem(None, "the batch cannot go on; the log has more", None, "internal_error"),)
        self._todo.clear()
        await self._end("failed")

    async def _end(self, status: Status) -> None:
        """Write the files of the batch, and end it."""
        batch, around = self.batch, self._around
        if self._todo:
            places = {number: self._places[number] for number in sorted(self._todo)}
            unanswered = await asyncio.to_thread(lambda: list(lines.left(status, self._path, places)))
            batch.failed += len(unanswered)
            await self._written(lambda: around.store.add(batch, unanswered))
        if batch.status == "in_progress":
            batch.enter("finalizing", around.clock())
        now = around.clock()
        ended = structs.replace(batch, times=dict(batch.times))  # callers see the end when its files are there
        ended.enter(status, now)
        expires = None if batch.output_seconds is None else now + batch.output_seconds
        output, errors = (
            FileRecord(new_id("file-"), f"{batch.id}_{kind}.jsonl", "batch_output", 0, now, expires, batch.owner)
            for kind in ("output", "error")
        )
        await self._written(lambda: around.store.end(ended, output, errors))
        self.batch = ended
        log("batch ended", batch=batch.id, status=status, completed=batch.completed, failed=batch.failed)

    async def _written(self, write: Callable[[], None]) -> None:
        """Run `write` on a thread, again and again until it succeeds. The first failure is logged."""
        pause = TICK_SECONDS
        while True:
            try:
                await asyncio.to_thread(write)
                return
            except StorageError as e:
                if pause == TICK_SECONDS:
                    log("batch waits for the drive", logging.WARNING, batch=self.batch.id, error=e.message)
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_PAUSE)
