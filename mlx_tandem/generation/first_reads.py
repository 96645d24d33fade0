"""Adapter folders that are read because somebody has asked for them: each once, however many wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from mlx_tandem.errors import Timeout


class FirstReads:
    """The readings under way. `seconds` is how long somebody waits, 0 for as long as it takes; a reading goes on for
    those who come later."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._reading: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether `name` is being read now."""
        return name in self._reading

    async def wait(self, name: str, read: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait until `name` was read, by `read` unless that is under way. Raises what `read` raises, and Timeout."""
        reading = self._reading.get(name)
        if reading is None:
            reading = self._reading[name] = asyncio.create_task(read())
            reading.add_done_callback(lambda done: self._was_read(name, done))
        try:
            async with asyncio.timeout(self._seconds or None):
                await asyncio.shield(reading)  # others may wait for it, too
        except TimeoutError:
            raise Timeout(
                f"the adapter {name} could not be read within {self._seconds:g} s", code="first_token_timeout"
            ) from None

    def _was_read(self, name: str, reading: asyncio.Task[None]) -> None:
        del self._reading[name]
        if not reading.cancelled():
            reading.exception()  # those who waited have it; nobody may be left
