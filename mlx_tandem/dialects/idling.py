"""Unloading of the engine when nobody has used it for a while, and how long requests want it kept."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import Awaitable, Callable

from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.log import log_exception

TICK_SECONDS = 0.25
"""Seconds between two looks at an engine that is used, or that will soon have been unused for long enough."""

LONGEST_SECONDS = 3600.0
"""Longest time between two looks."""

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|ms|s|m|h)")
"""One part of a duration as Go writes it, such as 1h or 30m."""

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


class Idling:
    """Unloads the engine after `limit` seconds without use, if the server's settings allow that."""

    def __init__(
        self, client: EngineClient, limit: float, is_free: Callable[[], bool], save: Callable[[], Awaitable[bool]]
    ):
        """Begin with the `limit` of the settings; 0: never. Nothing is unloaded before `start`.

        `is_free` returns whether neither learning nor a client's session needs the engine now. `save` saves what the
        next engine needs, or returns False.
        """
        self._client = client
        self._default = self._limit = limit
        self._is_free, self._save = is_free, save
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether the engine is ever unloaded."""
        return self._default > 0

    @property
    def left(self) -> float:
        """Seconds until the engine is unloaded if nobody uses it until then; infinite if it never is."""
        if not self.is_on:
            return float("inf")
        return max(self._limit - self._client.unused_seconds, 0.0)

    def start(self) -> None:
        """Begin to watch how the engine is used, unless it is never unloaded; a second call does nothing."""
        if self.is_on and self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """End the task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def keep(self, seconds: float | None) -> None:
        """Set the seconds without use until the engine is unloaded next; then the limit of the settings holds again.

        Infinite means that it is kept for good. None, every value on a server that never unloads, and every value from
        a key without the scope admin change nothing: other keys use the same engine.
        """
        if seconds is not None and self.is_on and "admin" in CALLER.get().scopes:
            self._limit = seconds
            self._changed.set()

    async def _run(self) -> None:
        """Unload the engine each time that it has been unused for long enough."""
        while True:
            self._changed.clear()
            seconds = self._limit if self._client.state == "idle" else self.left
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(max(seconds, TICK_SECONDS), LONGEST_SECONDS))
            try:
                await self._look()
            except Exception as e:
                log_exception("the engine was not unloaded", e)

    async def _look(self) -> None:
        """Unload the engine if it has been unused for long enough."""
        client = self._client
        if self.left > 0 or client.state != "ready" or client.is_used or not self._is_free():
            return
        if not await self._save():
            return
        await client.refresh()  # its last counters
        if self._is_free() and client.unload():
            self._limit = self._default


def keep_alive_seconds(value: float | str | None, param: str = "keep_alive") -> float | None:
    """Return the seconds that Ollama's `keep_alive` stands for: a number of them, or a duration such as 1h30m.

    A negative one is infinite. Raises InvalidRequest naming `param` for another text.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = _parsed(value, param)
    if math.isnan(value):
        raise InvalidRequest(f"{param} must be a number of seconds, or a duration such as 5m", param=param)
    return float("inf") if value < 0 else value


def _parsed(text: str, param: str) -> float:
    """Return the seconds of a duration or a number in a text."""
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _DURATION.findall(rest)
    if parts and "".join(map("".join, parts)) == rest:
        return sign * sum(float(number) * _SECONDS[unit] for number, unit in parts)
    try:
        if math.isfinite(seconds := float(text)):
            return seconds
    except ValueError:
        pass
    message = f"{param} is {text[:40]!r}: it is a number of seconds, or a duration such as 30s, 5m or 1h30m"
    raise InvalidRequest(message, param=param)
