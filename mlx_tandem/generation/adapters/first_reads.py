"""Reading adapter folders on first use, each of them once for all requests that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mlx_tandem.errors import Timeout


class FirstReads:
    """The adapter folders that are being read now. It belongs to one event loop."""

    def __init__(self, seconds: float):
        """Limit each wait to `seconds`; 0 means no limit. A reading continues after a caller has stopped waiting."""
        self._seconds = seconds
        self._reading: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._reading

    async def wait(self, name: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until `name` has been read. Start `read` for it unless a reading is already under way.

        Raises the errors of `read`, and Timeout.
        """
        reading = self._reading.get(name)
        if reading is None:
            reading = self._reading[name] = asyncio.create_task(read())
            reading.add_done_callback(lambda done: self._was_read(name, done))
        try:
            async with asyncio.timeout(self._seconds or None):
                await asyncio.shield(reading)  # Other callers may wait for it, too.
        except TimeoutError:
            raise Timeout(
                f"the adapter {name} could not be read within {self._seconds:g} s", code="first_token_timeout"
            ) from None

    def _was_read(self, name: str, reading: asyncio.Task[None]) -> None:
        del self._reading[name]
        if not reading.cancelled():
            reading.exception()  # Waiting callers have got it. This call marks it as seen if nobody waits any more.
