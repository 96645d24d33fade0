"""The timers of a client's connection: a timer that can be stopped, the watch of slow readers, and probes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from mlx_tandem.log import log

PROBE_SECONDS = 1.0
"""Seconds between two probes of a client that has sent its last byte and waits for its answer."""

MAX_ZEROS = 4
"""Most leading zeros that probes add to a chunk's size. The strictest known clients accept sizes of 16 digits."""


class Timer:
    """A timer that calls `late` once, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, late: Callable[[], None]):
        self._loop = loop
        self._seconds = seconds
        self._late = late
        self._handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Whether `late` will be called."""
        return self._handle is not None

    def start(self) -> None:
        """Start the timer; one that runs starts again."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._end)

    def stop(self) -> None:
        """Stop the timer if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self) -> None:
        self._handle = None
        self._late()


class ReaderWatch:
    """The watch of a client that has to receive what was written to it: one that receives nothing is cut off."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, transport: asyncio.WriteTransport):
        self._transport = transport
        self._timer = Timer(loop, seconds, self._look)
        self._unsent = 0  # bytes in the write buffer at the last look

    def start(self) -> None:
        """Begin to watch the client if the write buffer is not empty."""
        self._timer.stop()
        self._unsent = self._transport.get_write_buffer_size()
        if self._unsent:
            self._timer.start()

    def stop(self) -> None:
        """Stop watching the client."""
        self._timer.stop()

    def _look(self) -> None:
        """Abort the connection if the client has received nothing since the last look."""
        if self._transport.get_write_buffer_size() < self._unsent:
            self.start()
        else:
            log("client takes nothing", logging.WARNING)
            self._transport.abort()


class Answer(Protocol):
    """The answer that a probed client waits for."""

    response_started: bool
    chunked_encoding: bool | None


class Probes:
    """The probes of a client that has sent its last byte and waits for its answer.

    A probe writes bytes that a client skips and that a closed socket answers with a reset. Before an answer these are
    `100 Continue`, which HTTP/1.1 clients skip (RFC 9110, 15.2). Within a stream they are a leading zero of the next
    chunk's size (RFC 9112, 7.1).
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport, answer: Callable[[], Answer | None]
    ):
        """`answer` returns the answer that is due; None ends the probes."""
        self._transport = transport
        self._answer = answer
        self._timer = Timer(loop, PROBE_SECONDS, self._probe)
        self._zeros = 0  # number of zeros that have been written

    def start(self) -> None:
        """Probe the client every PROBE_SECONDS from now on."""
        self._timer.start()

    def stop(self) -> None:
        """End the probes."""
        self._timer.stop()

    def _probe(self) -> None:
        """Write bytes that a client skips."""
        answer = self._answer()
        if answer is None or self._transport.is_closing():
            return
        if not answer.response_started:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif answer.chunked_encoding and self._zeros < MAX_ZEROS:
            self._transport.write(b"0")
            self._zeros += 1
        self.start()
