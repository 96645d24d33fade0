"""The front's end of the socket to one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from mlx_tandem.engine.messages import Inbound
from mlx_tandem.engine.wire import FrameReader, WireError, decode_outbound, encode


class Link(asyncio.Protocol):
    """Reads whole frames and hands on their messages; `ended` tells when the connection is over, and `why`."""

    def __init__(self, on_messages: Callable[[list[Any]], None]):
        self._on_messages = on_messages
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._open = True
        self._closing = False
        self.heard = self._loop.time()
        self.why = "the engine closed its socket"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()
        try:
            for frame in self._reader.feed(data):
                self._on_messages(decode_outbound(frame))
        except (WireError, ValueError) as e:
            self.why = f"it sent what is not a frame: {e}"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._open = False
        self._wake.set()

    async def ended(self, wait: float) -> bool:
        """Whether the connection is over; waits up to `wait` seconds for that, less after a nudge."""
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
        """Whether the engine ended the connection, and not we."""
        return not self._open and not self._closing

    def nudge(self) -> None:
        self._wake.set()

    def send(self, *messages: Inbound) -> None:
        if self._open and self._transport is not None:
            self._transport.write(encode(messages))

    def close(self) -> None:
        if self._open and self._transport is not None:
            self._closing = True
            self._transport.abort()
