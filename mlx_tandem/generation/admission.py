"""Admission of requests: a limit on them, places for choices, and nobody while the pool is nearly full."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_tandem.config import ServerConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest, Overloaded

HISTORY = 256
"""Endings that the rate is measured over."""


class Admission:
    """Counters of what is open, on one event loop. Refusing costs a few comparisons and no word with the engine."""

    def __init__(self, server: ServerConfig, client: EngineClient, clock: Callable[[], float] = time.monotonic):
        self._server = server
        self._client = client
        self._clock = clock
        self.open_requests = 0
        self.open_choices = 0
        self.refused: Counter[str] = Counter()  # by the setting that refused
        self._idle = asyncio.Event()
        self._idle.set()
        self._busy = 0.0  # seconds, before `_since`, in which something was open
        self._since = 0.0
        self._endings: deque[float] = deque([0.0], HISTORY)  # in busy seconds

    @property
    def utilization(self) -> float:
        """Return the share of the pool's blocks in use, 0 to 1. With nothing open it is 0, whatever the engine said."""
        load = self._client.load
        blocks = load.used_blocks + load.free_blocks
        return load.used_blocks / blocks if blocks and self.open_requests else 0.0

    def check(self, choices: int = 1) -> None:
        """Raise Overloaded unless a request of so many choices would be let in now, InvalidRequest when it never would
        be, and EngineUnavailable while nobody is."""
        server = self._server
        capacity = self._client.check_ready().max_num_seqs + server.max_queue_size
        if choices > capacity:
            raise InvalidRequest(f"prompts × n is {choices}; this server takes {capacity} at most", param="prompt")
        if 0 < server.max_concurrent_requests <= self.open_requests:
            raise self._refusal("max_concurrent_requests", "the server has as many requests as it takes", 1.0)
        over = self.open_choices + choices - capacity
        if over > 0:
            requests = over * self.open_requests / self.open_choices
            raise self._refusal("max_queue_size", "the server's queue is full", requests)
        if self.utilization >= server.memory_pressure_threshold:
            load = self._client.load
            limit = server.memory_pressure_threshold * (load.used_blocks + load.free_blocks)
            requests = (load.used_blocks - limit + 1) * self.open_requests / load.used_blocks
            message = "the cache for prompts and answers is nearly full"
            raise self._refusal("memory_pressure_threshold", message, requests)

    def _refusal(self, setting: str, message: str, requests: float) -> Overloaded:
        self.refused[setting] += 1
        wait = max(requests, 1.0) / self._rate()
        if setting == "memory_pressure_threshold":
            return Overloaded(message, retry_after=wait, status=503, code="memory_pressure")
        return Overloaded(message, retry_after=wait)

    def _rate(self) -> float:
        """Return how many requests end in a second, over the last HISTORY of them and the time in which any were open.
        Before the first has ended it is as if one ended now."""
        seconds = self._busy + self._clock() - self._since - self._endings[0]
        return max(len(self._endings) - 1, 1) / max(seconds, 1e-3)

    @contextmanager
    def admitted(self, choices: int) -> Iterator[None]:
        """Hold the places of one request. Raises as `check` does."""
        self.check(choices)
        if not self.open_requests:
            self._since = self._clock()
            self._idle.clear()
        self.open_requests += 1
        self.open_choices += choices
        try:
            yield
        finally:
            self.open_requests -= 1
            self.open_choices -= choices
            busy = self._busy + self._clock() - self._since
            self._endings.append(busy)
            if not self.open_requests:
                self._busy = busy
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()
