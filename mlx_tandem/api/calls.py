"""Begins work on the front's event loop from any thread of the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from mlx_tandem.errors import EngineError

T = TypeVar("T")


def begin(loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
    """Begin `work` on a loop of another thread and return the future of its result, whose `cancel` cancels it.

    The coroutine is made on the loop. One that was made in the caller's thread would be left without anybody to await
    it if the caller pressed Ctrl-C before the loop had it, and Python would print a warning. Raises EngineError if the
    loop is closed.
    """
    if loop.is_closed():
        raise EngineError("this engine was closed")
    result: Future[T] = Future()

    async def run() -> T:
        return await work()

    def finish(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            result.cancel()
            return
        error = task.exception()
        if not result.set_running_or_notify_cancel():
            return
        if error is None:
            result.set_result(task.result())
        else:
            result.set_exception(error)

    def start() -> None:
        if result.cancelled():
            return
        task = loop.create_task(run())
        task.add_done_callback(finish)
        result.add_done_callback(lambda _: None if loop.is_closed() else loop.call_soon_threadsafe(task.cancel))

    loop.call_soon_threadsafe(start)
    return result
