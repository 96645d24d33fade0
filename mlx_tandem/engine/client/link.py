"""The client's end of the socket to one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

from mlx_tandem.engine.messages import Inbound
from mlx_tandem.engine.wire import FrameReader, WireError, decode_outbound, encode


class Link(asyncio.Protocol):
    """The connection to one engine, which decodes whole frames and hands on their messages.

    `ended` says when it is over, `why` for what reason, and `heard` when data last came, in
    seconds of the monotonic clock. The loop's own clock goes on on macOS while the machine sleeps, under uvloop.
    """

    def __init__(self, on_messages: Callable[[list[Any]], None]):
        self._on_messages = on_messages
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._wake = asyncio.Event()
        self._open = True
        self._closing = False
        self.heard = time.monotonic()
        self.why = "the engine closed its socket"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport to write to."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        """Hand on the messages of the frames that are complete now; close the connection on what is not a frame."""
        self.heard = time.monotonic()
        try:
            for frame in self._reader.feed(data):
                self._on_messages(decode_outbound(frame))
        except (WireError, ValueError) as e:
            self.why = f"it sent what is not a frame: {e}"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the connection is over."""
        self._open = False
        self._wake.set()

    async def ended(self, wait: float) -> bool:
        """Wait up to `wait` seconds for the end of the connection, less after `nudge`; return whether it is over."""
        if self._open:
            try:
                async with asyncio.timeout(wait):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
        return not self._open

    @property
    def hung_up(self) -> bool:
        """Whether the engine ended the connection, and not this side."""
        return not self._open and not self._closing

    def nudge(self) -> None:
        """End a wait in `ended`, now or the next one."""
        self._wake.set()

    def send(self, *messages: Inbound) -> None:
        """Send messages in one frame; do nothing when the connection is over."""
        if self._open and self._transport is not None:
            self._transport.write(encode(messages))

    def close(self) -> None:
        """End the connection at once; a second call does nothing."""
        if self._open and self._transport is not None:
            self._closing = True
            self._transport.abort()
