"""A common limit on the bytes of all request bodies that are being received or read."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlx_tandem.errors import Overloaded

SMALL_BODY = 65_536
"""Most bytes of a small body. After a refusal, a small body is received and dropped to keep the connection usable."""

RESERVE = 16 << 20
"""Bytes beside the limit that only small bodies may use, so that large ones never keep them out."""

SHARE_OF_NEWEST = 0.1
"""Weight of the newest large body in the moving average of the seconds that one is held, 0 to 1."""

RECEIVING = "received_bodies"
"""The reason under which refusals are counted."""


class Incoming:
    """One body. Its bytes count from their arrival until what was asked for is known to the rest of the server."""

    def __init__(self, receiving: Receiving):
        self._receiving = receiving
        self.size = 0
        self.began = 0.0
        self.timer: asyncio.Timeout | None = None
        self.lost: Overloaded | None = None

    def grow(self, size: int) -> None:
        """Count `size` more bytes. Raises Overloaded if there is no room for them."""
        self._receiving.grow(self, size)

    def complete(self) -> None:
        """Say that all of the body has arrived, so that it gives way to no other any more."""
        self._receiving.complete(self)

    def give_way(self, error: Overloaded) -> None:
        """End receiving the body, which raises TimeoutError where its timer runs."""
        self.lost = error
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(0.0)


class Receiving:
    """Counters of the bodies of one event loop. Refusals are counted in `refused`.

    While there is room, bodies take it as they arrive, whatever length they announced. For a large body without room,
    the slowest of the large ones that are still arriving gives way, by its average pace; this may be the body itself.
    Small bodies may use RESERVE bytes more, and for them the slowest large body gives way, or the oldest small one.
    """

    def __init__(self, most: int, refused: Counter[str], clock: Callable[[], float] = time.monotonic):
        self._most = most
        self._refused = refused
        self._clock = clock
        self.bytes = 0
        self._small: dict[Incoming, None] = {}  # those that are still arriving, the oldest first
        self._large: dict[Incoming, None] = {}
        self._held = 0.0  # moving average of the seconds that a large body is held
        self.turn = asyncio.Lock()
        """Held while a large body is decoded, so that the loop can do other work between two of them."""

    @contextmanager
    def body(self) -> Iterator[Incoming]:
        """Count one body while the block runs."""
        body = Incoming(self)
        try:
            yield body
        finally:
            self._forget(body)
            self.bytes -= body.size
            if body.size > SMALL_BODY:
                self._held += SHARE_OF_NEWEST * (self._clock() - body.began - self._held)

    def grow(self, body: Incoming, size: int) -> None:
        """Count `size` more bytes of a body. Raises Overloaded if there is no room for them."""
        if body.lost is not None:
            raise body.lost
        if not body.size:
            body.began = self._clock()
        self._forget(body)
        body.size += size
        self.bytes += size
        is_small = body.size <= SMALL_BODY
        (self._small if is_small else self._large)[body] = None
        while self.bytes > self._most + RESERVE * is_small:
            loser = self._slowest() if self._large else next(iter(self._small))
            self._forget(loser)
            self.bytes -= loser.size
            loser.size = 0
            error = self._refusal()
            loser.give_way(error)
            if loser is body:
                raise error

    def complete(self, body: Incoming) -> None:
        """Let a body give way to no other any more."""
        if body.lost is not None:
            raise body.lost
        self._forget(body)

    def _forget(self, body: Incoming) -> None:
        """Let a body give way to no other."""
        self._small.pop(body, None)
        self._large.pop(body, None)

    def _slowest(self) -> Incoming:
        """Return the large body that arrives most slowly."""
        now = self._clock()
        return min(self._large, key=lambda body: body.size / max(now - body.began, 1e-3))

    def _refusal(self) -> Overloaded:
        """Count a refusal and return its error."""
        self._refused[RECEIVING] += 1
        message = "the server receives as many bytes of requests as it takes"
        return Overloaded(message, retry_after=self._held)
