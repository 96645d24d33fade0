"""One client's connection: uvicorn's HTTP/1.1, with limits on how slowly a client may send and take.

What a slow reader can hold is bounded: the write buffer up to its high-water mark, from where on nothing more is
written, and the deltas that wait in its stream, at most one for each token up to `max_tokens`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mlx_tandem.config import ServerConfig
from mlx_tandem.errors import InvalidRequest, ReceiveTimeout, TandemError, TooLarge
from mlx_tandem.server.error_reply import error_body
from mlx_tandem.server.log import log

MAX_HEAD = 65_536
"""Bytes of a request's head and its trailers."""

MAX_AHEAD = 8
"""Requests sent ahead of their turn up to which more is read, so that a client that leaves is noticed behind them."""


class Connection(HttpToolsProtocol):
    """Ends the connection of a client whose head or body does not come within `receive_seconds`, and of one that
    takes nothing for `write_seconds`. A request that comes in one piece costs no timer."""

    receive_seconds = 30.0
    write_seconds = 60.0

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._part: Literal["head", "body"] | None = None  # what is awaited from the client
        self._head_bytes = 0  # of head and trailers, as far as the parser has handed them over
        self._held_bytes = 0  # came since the parser has handed something over
        self._running: RequestResponseCycle | None = None  # the one before the application; `cycle` is the newest
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._unsent = 0  # bytes at the last look

    # -- receiving ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await()

    def data_received(self, data: bytes) -> None:
        if self._part is None and (self.cycle is None or self.cycle.response_complete):
            self._part, self._head_bytes, self._held_bytes = "head", 0, 0
        before = self._part, self.cycle
        self._held_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if (self._part, self.cycle) != before:
            self._stop_waiting()
        if self._head_bytes + self._held_bytes > MAX_HEAD:
            self._refuse_head()
        elif self._part is not None and self._receiving is None:
            self._await()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part, self._head_bytes, self._held_bytes = "head", 0, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._part == "head":  # what a trailer says comes too late to be believed
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._part, self._held_bytes = "body", 0
        if 0 < len(self.pipeline) <= MAX_AHEAD:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._held_bytes = 0

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part, self._held_bytes = None, 0

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._held_bytes = 0
        if self._head_bytes > MAX_HEAD:
            raise ValueError("the head is too large")  # ends the parser, which calls send_400_response

    def _await(self) -> None:
        self._receiving = self.loop.call_later(self.receive_seconds, self._is_late)

    def _stop_waiting(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _is_late(self) -> None:
        self._receiving = None
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._await()  # it is being answered, maybe with a 408; what it sends meanwhile may wait in our buffers
        elif self._part == "head":
            self._refuse(ReceiveTimeout(f"the request's head did not come within {self.receive_seconds:g} s"))
        else:
            self._close()

    def send_400_response(self, msg: str) -> None:
        if self._head_bytes > MAX_HEAD:
            self._refuse_head()
        else:
            self._refuse(InvalidRequest("this is not an HTTP request", code="invalid_request"))

    def _refuse_head(self) -> None:
        error = TooLarge(f"the request's head is over {MAX_HEAD} bytes")
        error.status = 431
        self._refuse(error)

    def _refuse(self, error: TandemError) -> None:
        """Ends the connection, with an answer if no other one is due or begun."""
        if self._may_answer():
            body = error_body(error)
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._leave()
        self._close()

    def _may_answer(self) -> bool:
        cycle = self.cycle
        if self._part == "body":
            return cycle is self._running and not cycle.response_started
        return cycle is None or cycle.response_complete

    # -- answering ----------------------------------------------------------------------------------------------

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()

    def _leave(self) -> None:
        """Tells the application that its client is gone; what it still says is dropped."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_writing()
        self._leave()
        super().connection_lost(exc)

    # -- writing ------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._stop_writing()

    def timeout_keep_alive_handler(self) -> None:
        self._close()

    def _close(self) -> None:
        """Once the client has taken what is written, for as long as it takes any of it."""
        self.transport.close()
        self._watch_writing()

    def _watch_writing(self) -> None:
        self._stop_writing()
        self._unsent = self.transport.get_write_buffer_size()
        if self._unsent:
            self._writing = self.loop.call_later(self.write_seconds, self._look_at_writing)

    def _look_at_writing(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_writing()
        else:
            log("client takes nothing", logging.WARNING)
            self.transport.abort()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None


def connection_class(server: ServerConfig) -> type[Connection]:
    """uvicorn makes the connections and takes a class."""
    limits = {"receive_seconds": server.receive_timeout_s, "write_seconds": server.write_timeout_s}
    return type("Connection", (Connection,), limits)
