"""Admission of texts to tokenise: a bound on the bytes that they hold, and places for long ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from mlx_tandem.errors import Overloaded
from mlx_tandem.limits import MAX_WAITING_TEXT

PLACES = 4
"""Long texts that are worked on, or whose replies are being sent, at once."""

PATIENCE = 60.0
"""Seconds that a long text waits for a place."""

LEAST = 4096
"""Bytes that a request counts for, however short it is."""

SHARE_OF_NEWEST = 0.1
"""Weight of the newest text in the moving average of the pace."""

WAITING_TEXT = "waiting_text"
"""What refusals are counted under."""


class TextAdmission:
    """Counters of the texts in memory, on one event loop. `refused` counts the refusals."""

    def __init__(self, refused: Counter[str]):
        self._refused = refused
        self._bytes = 0
        self._places = asyncio.Semaphore(PLACES)
        self._pace = 0.0  # seconds that the server takes for a byte of a long text, a moving average

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Count a request with a body of `size` bytes. Raises Overloaded when others hold too much already."""
        size = max(size, LEAST)
        if self._bytes and self._bytes + size > MAX_WAITING_TEXT:
            raise self._refusal(429)
        with self.counted(size):
            yield

    @contextmanager
    def counted(self, size: int) -> Iterator[None]:
        """Count `size` more bytes for as long as they are in memory: of a reply that needs no place."""
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Hold one of the places for a text of about `size` bytes. Raises Overloaded when none becomes free."""
        try:
            async with asyncio.timeout(PATIENCE):
                await self._places.acquire()
        except TimeoutError:
            raise self._refusal(503) from None
        began = monotonic()
        try:
            yield
        finally:
            self._places.release()
            pace = (monotonic() - began) / (PLACES * max(size, LEAST))
            self._pace += SHARE_OF_NEWEST * (pace - self._pace)

    def _refusal(self, status: int) -> Overloaded:
        self._refused[WAITING_TEXT] += 1
        return Overloaded("too many texts wait to be tokenised", retry_after=self._bytes * self._pace, status=status)
