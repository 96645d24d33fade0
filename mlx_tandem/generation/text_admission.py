"""Admission of texts to tokenise: a limit on their bytes in memory, and places for long ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from mlx_tandem.errors import Overloaded
from mlx_tandem.limits import MAX_WAITING_TEXT

PLACES = 4
"""Most long texts that are tokenised, or whose replies are being sent, at the same time."""

PLACE_SECONDS = 60.0
"""Most seconds that a long text waits for a place."""

LEAST = 4096
"""Fewest bytes that a request counts for, however short it is."""

SHARE_OF_NEWEST = 0.1
"""Weight of the newest text in the moving average of the pace, 0 to 1."""

WAITING_TEXT = "waiting_text"
"""The reason under which refusals are counted."""


class TextAdmission:
    """Counters of the texts in memory, on one event loop. Refusals are counted in `refused`."""

    def __init__(self, refused: Counter[str]):
        self._refused = refused
        self._bytes = 0
        self._places = asyncio.Semaphore(PLACES)
        self._pace = 0.0  # moving average of the seconds that the server takes for a byte of a long text

    @contextmanager
    def admitted(self, size: int) -> Iterator[None]:
        """Count a request with a body of `size` bytes while the block runs.

        Raises Overloaded when the bytes of all requests would be over the limit. A single request is always admitted.
        """
        size = max(size, LEAST)
        if self._bytes and self._bytes + size > MAX_WAITING_TEXT:
            raise self._refusal(429)
        with self.counted(size):
            yield

    @contextmanager
    def counted(self, size: int) -> Iterator[None]:
        """Count `size` more bytes while the block runs. Replies that need no place are counted with this."""
        self._bytes += size
        try:
            yield
        finally:
            self._bytes -= size

    @asynccontextmanager
    async def place(self, size: int) -> AsyncIterator[None]:
        """Hold a place for a text of about `size` bytes. Raises Overloaded when none is free after PLACE_SECONDS."""
        try:
            async with asyncio.timeout(PLACE_SECONDS):
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
        """Count a refusal and return its error with this HTTP status."""
        self._refused[WAITING_TEXT] += 1
        return Overloaded("too many texts wait to be tokenised", retry_after=self._bytes * self._pace, status=status)
