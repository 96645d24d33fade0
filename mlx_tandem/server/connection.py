"""A client's connection: uvicorn's HTTP/1.1, with limits on how slowly a client may send and receive.

The memory that a slow reader can hold is bounded: its write buffer, to which nothing is added above the high-water
mark, and the deltas that wait in its stream, which are at most one for each token up to `max_tokens`.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any, Literal

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mlx_tandem.config import ServerConfig
from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.errors import InvalidRequest, ReceiveTimeout, TandemError, TooLarge
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.server.connection_timers import Probes, ReaderWatch, Timer
from mlx_tandem.server.error_log import note
from mlx_tandem.server.request_id import request_id

MAX_HEAD = 65_536
"""Most bytes of a request's head and its trailers."""

MAX_AHEAD = 8
"""Most pipelined requests that wait while the connection is still read, so that a client that leaves is noticed."""


class Connection(HttpToolsProtocol):
    """A connection with time limits on receiving and sending.

    It ends when the client's head or body does not arrive within `receive_seconds`, or when the client receives nothing
    for `write_seconds`. A request that arrives in one piece needs no timer.

    A complete request is answered whatever follows it. If the data after it is not HTTP, the client gets a refusal
    after the last answer, and the connection ends.
    """

    receive_seconds = 30.0
    write_seconds = 60.0
    metrics = Metrics()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._part: Literal["head", "body"] | None = None  # the part that the client has to send next
        self._head_bytes = 0  # bytes of head and trailers that the parser has handed over
        self._held_bytes = 0  # bytes received since the parser last handed something over
        self._running: RequestResponseCycle | None = None  # the request being answered; `cycle` is the newest one
        self._receiving = Timer(self.loop, self.receive_seconds, self._is_late)
        self._reader: ReaderWatch  # these two begin with the connection
        self._probes: Probes
        self._refusal: TandemError | None = None  # sent after the last answer that is due; nothing more is parsed
        self._ended = False  # whether the client has sent its last byte while answers were due

    # -- receiving ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timer for the first request's head."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._reader = ReaderWatch(self.loop, self.write_seconds, self.transport)
        self._probes = Probes(self.loop, self.transport, lambda: self._running)
        self._receiving.start()

    def data_received(self, data: bytes) -> None:
        """Parse data, and keep the timer of receiving and the limit of the head up to date."""
        if self._refusal is not None:
            return  # The connection is still read, so that a client that leaves is noticed.
        if self._part is None and (self.cycle is None or self.cycle.response_complete):
            self._part, self._head_bytes, self._held_bytes = "head", 0, 0
        before = self._part, self.cycle
        self._held_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing() or self._refusal is not None:
            return
        if (self._part, self.cycle) != before:
            self._receiving.stop()
        if self._head_bytes + self._held_bytes > MAX_HEAD:
            self._refuse(_too_large())
        elif self._part is not None and not self._receiving.is_running:
            self._receiving.start()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether the connection stays open after the client's last byte, which it does while answers are due.

        A client that has closed its socket sends the same FIN as one that has closed only its sending half. TCP tells
        them apart at the next writes: a closed socket answers the first with a reset, and the second one fails. So the
        second write notices that a client is gone, and `connection_lost` cancels its work. A reset that the client
        itself sends is noticed at once. The events of a stream are such writes. In addition, the client is probed with
        legal bytes that mean nothing (`Probes`).

        Clients that cannot be probed count as gone: HTTP/1.0 has no interim responses (nginx uses it for its upstreams,
        but never closes one half), and a TLS connection cannot be closed by halves.
        """
        if self._part == "body":
            if self.cycle is self._running:
                return False  # The rest of the body will never come.
            self.pipeline.popleft()
        self._part = None
        self._receiving.stop()
        cycle = self._running
        can_probe = cycle is not None and cycle.scope["http_version"] == "1.1" and self.scheme == "http"
        self._ended = self._is_answering() and can_probe
        if self._ended:
            self._probes.start()
        return self._ended

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        self._part, self._head_bytes, self._held_bytes = "head", 0, 0

    def on_url(self, url: bytes) -> None:
        """Take a piece of the request's target."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header of the request. Trailers only count towards the size of the head."""
        self._count(len(name) + len(value) + 4)
        if self._part == "head":
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application or queue the request, and keep reading while few requests wait."""
        super().on_headers_complete()
        self._part, self._held_bytes = "body", 0
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the request's body."""
        super().on_body(body)
        self._held_bytes = 0

    def on_message_complete(self) -> None:
        """End a request, which has arrived completely."""
        super().on_message_complete()
        self._part, self._held_bytes = None, 0

    def _count(self, size: int) -> None:
        """Add `size` bytes to the head. Raises ValueError when it becomes too large."""
        self._head_bytes += size
        self._held_bytes = 0
        if self._head_bytes > MAX_HEAD:
            raise ValueError("the head is too large")  # The parser ends and calls send_400_response.

    def _is_late(self) -> None:
        """Refuse a head or end the connection for a body that did not arrive in time."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # An answer is under way, maybe a 408. Data that arrives meanwhile may wait in our buffers.
            self._receiving.start()
        elif self._part == "head":
            self._refuse(ReceiveTimeout(f"the request's head did not come within {self.receive_seconds:g} s"))
        else:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """Refuse data that is not HTTP, or a head that is too large."""
        if self._head_bytes > MAX_HEAD:
            self._refuse(_too_large())
        else:
            self._refuse(InvalidRequest("this is not an HTTP request", code="invalid_request"))

    def _refuse(self, error: TandemError) -> None:
        """Accept nothing more from the client, and send it `error` after the answers to its earlier requests.

        A request whose answer has begun gets no second answer.
        """
        self._receiving.stop()
        if self._part == "body" and self.cycle is self._running:
            if not self.cycle.response_started:
                self._write_error(error, dict(self.cycle.scope))
            self._leave()
            self._close()
            return
        if self._part == "body":
            self.pipeline.popleft()  # This request will never be whole.
        self._part = None
        self._refusal = error
        self.flow.resume_reading()
        self._finish()

    def _finish(self) -> None:
        """End the connection if no more data of the client will be parsed and all answers have been sent."""
        if self._is_answering() or not (self._ended or self._refusal is not None):
            return
        if self._refusal is not None:
            self._write_error(self._refusal, {"client": self.client})
        self._close()

    def _write_error(self, error: TandemError, scope: MutableMapping[str, Any]) -> None:
        """Write a whole error reply, and count and log it. `scope` is the request's."""
        note(self.metrics, error, scope)
        body = error_body(error)
        head = (
            f"content-type: application/json\r\nx-request-id: {request_id(scope)}\r\n"
            f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.transport.write(STATUS_LINE[error.status] + head.encode() + body)

    def _is_answering(self) -> bool:
        """Return whether an answer is due or under way."""
        return bool(self.pipeline) or (self._running is not None and not self._running.response_complete)

    # -- answering ----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """End the connection if this was its last answer."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        else:
            self._finish()

    def _leave(self) -> None:
        """Tell the application that its client is gone. The rest of its answer is dropped."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers, and cancel the request that is being answered."""
        self._receiving.stop()
        self._reader.stop()
        self._probes.stop()
        self._leave()
        super().connection_lost(exc)

    # -- writing ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Begin to watch whether the client receives anything, since the write buffer is full."""
        super().pause_writing()
        self._reader.start()

    def resume_writing(self) -> None:
        """Stop watching the client, since the write buffer has room again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._reader.stop()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for too long."""
        self._close()

    def _close(self) -> None:
        """Close the connection when the client has received all written bytes, or when it stops receiving them."""
        self.transport.close()
        self._reader.start()


def _too_large() -> TandemError:
    """Return the error for a head that is too large."""
    error = TooLarge(f"the request's head is over {MAX_HEAD} bytes")
    error.status = 431
    return error


def connection_class(server: ServerConfig, metrics: Metrics | None = None) -> type[Connection]:
    """Return the class of the connections for uvicorn. Their own refusals are counted in `metrics`."""
    own = {
        "receive_seconds": server.receive_timeout_s,
        "write_seconds": server.write_timeout_s,
        "metrics": metrics or Metrics(),
    }
    return type("Connection", (Connection,), own)
