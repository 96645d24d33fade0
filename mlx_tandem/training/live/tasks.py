"""Tasks in the background of requests, whose number is bounded by letting requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from mlx_tandem.log import log_exception

MOST_TASKS = 256
"""Most tasks that score in the background. Above it, requests wait until their own task has ended."""


class Tasks:
    """The tasks in the background of one server, on its event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def settled(self) -> None:
        """Wait until all tasks in the background have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start `work` in the background. Wait until it has ended if more than MOST_TASKS tasks run there."""
        task = self.spawn(work)
        if len(self._tasks) > MOST_TASKS:
            await asyncio.wait({task})

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` in the background and return its task. Its errors are logged."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        ended = list(self._tasks)
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        """Forget a task that has ended, and log its error if it failed."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log_exception("work in the background failed", error)
