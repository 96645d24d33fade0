"""Admission of requests by limits on requests, on their choices, on their images, and on the use of the KV pool."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_tandem.config import ServerConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.errors import InvalidRequest, Overloaded
from mlx_tandem.generation.ending_rate import EndingRate
from mlx_tandem.generation.prompted import CLIENT
from mlx_tandem.limits import MAX_OPEN_ARRAYS


class RequestAdmission:
    """Counters of open requests and choices, on one event loop.

    A refusal costs a few comparisons and no message to the engine.
    """

    def __init__(self, server: ServerConfig, client: EngineClient, clock: Callable[[], float] = time.monotonic):
        self._server = server
        self._client = client
        self._ending = EndingRate(clock)
        self.open_requests = 0
        self.open_choices = 0
        self.open_arrays = 0  # bytes of the arrays of images
        self._of_clients: Counter[int] = Counter()  # choices that are open, by client
        self.held = 0  # requests that wait while the server is paused
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.refused: Counter[str] = Counter()  # by the setting, or the limit without a setting, that refused
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def utilization(self) -> float:
        """The share of the pool's blocks in use, 0 to 1. It is 0 without open requests, whatever the engine reports."""
        occupancy = self._client.occupancy
        blocks = occupancy.used_blocks + occupancy.free_blocks
        return occupancy.used_blocks / blocks if blocks and self.open_requests else 0.0

    def check(self, choices: int = 1, arrays: int = 0) -> None:
        """Raise unless a request of `choices` choices, with `arrays` bytes of its images, would be admitted now.

        Raises Overloaded when it may be admitted later, InvalidRequest when it never will be, and EngineUnavailable
        while no request is.
        """
        server = self._server
        capacity = self._client.check_ready().max_num_seqs + server.max_queue_size
        if choices > capacity:
            raise InvalidRequest(f"prompts × n is {choices}; this server takes {capacity} at most", param="prompt")
        if 0 < server.max_concurrent_requests <= self.open_requests:
            raise self._refusal("max_concurrent_requests", "the server has as many requests as it takes", 1.0)
        over = self.open_choices + choices - capacity
        if over > 0 and self._has_share(choices, capacity):
            requests = over * self.open_requests / self.open_choices
            raise self._refusal("max_queue_size", "the server's queue is full", requests)
        if arrays and self.open_arrays and self.open_arrays + arrays > MAX_OPEN_ARRAYS:
            raise self._refusal("open_images", "the server has as many images as it takes", 1.0)
        if self.utilization >= server.memory_pressure_threshold:
            occupancy = self._client.occupancy
            limit = server.memory_pressure_threshold * (occupancy.used_blocks + occupancy.free_blocks)
            requests = (occupancy.used_blocks - limit + 1) * self.open_requests / occupancy.used_blocks
            message = "the cache for prompts and answers is nearly full"
            raise self._refusal("memory_pressure_threshold", message, requests)

    def _has_share(self, choices: int, capacity: int) -> bool:
        """Return whether the caller would have more than an equal share of the capacity with so many more choices.

        A client that has less than its share is let in though others have filled the queue.
        """
        own = self._of_clients[CLIENT.get()]
        clients = len(self._of_clients) + (not own)
        return own + choices > capacity // clients

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """Let new requests wait until `resume`."""
        self._resumed.clear()

    def resume(self) -> None:
        """Admit the requests that wait, and all later ones."""
        self._resumed.set()

    async def turn(self) -> None:
        """Wait while the server is paused. Raises Overloaded if too many requests wait already."""
        if self._resumed.is_set():
            return
        if self.held >= max(self._server.max_queue_size, 1):
            raise self._refusal("max_queue_size", "the server is paused, and its queue is full", 1.0)
        self.held += 1
        try:
            await self._resumed.wait()
        finally:
            self.held -= 1
        self.check()

    def _refusal(self, reason: str, message: str, requests: float) -> Overloaded:
        """Count a refusal for `reason` and return its error.

        It advises a wait until as many requests have ended as wait for a seat now, and `requests` more. A client that
        comes earlier than that would only wait in the queue instead.
        """
        self.refused[reason] += 1
        wait = self._ending.seconds_for(self._queued() + max(requests, 1.0))
        if reason == "memory_pressure_threshold":
            return Overloaded(message, retry_after=wait, status=503, code="memory_pressure")
        return Overloaded(message, retry_after=wait)

    def _queued(self) -> float:
        """Return about how many requests wait for a seat, by the number of choices that are open."""
        waiting = self.open_choices - self._client.check_ready().max_num_seqs
        return waiting * self.open_requests / self.open_choices if waiting > 0 else 0.0

    @contextmanager
    def admitted(self, choices: int, arrays: int = 0) -> Iterator[None]:
        """Count one request while the block runs. Raises the errors of `check`."""
        self.check(choices, arrays)
        self._ending.began()
        self._idle.clear()
        self.open_requests += 1
        self.open_choices += choices
        client = CLIENT.get()
        self._of_clients[client] += choices
        self.open_arrays += arrays
        try:
            yield
        finally:
            self.open_requests -= 1
            self.open_choices -= choices
            self._of_clients[client] -= choices
            if not self._of_clients[client]:
                del self._of_clients[client]
            self.open_arrays -= arrays
            self._ending.ended()
            if not self.open_requests:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()
