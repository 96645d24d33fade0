"""One connection over a real socket, on an event loop whose clock stands still until a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import selectors
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from mlx_tandem.config import ServerConfig
from mlx_tandem.server.connection import Connection, connection_class
from mlx_tandem.server.connection_timers import PROBE_SECONDS

POST = b"POST / HTTP/1.1\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
GET = b"GET / HTTP/1.1\r\n\r\n"
LIMITS = ServerConfig()
BODY = POST + b"Content-Length: 3\r\n\r\nabc"
WHOLE = {GET: b"00000", BODY: b"00003", CHUNKED + b"\r\n": b"00001", POST + b"\r\n": b"00000"}
"""Requests and what `echo` answers."""


class Selector(selectors.DefaultSelector):
    """Fails where a loop whose clock stands still would wait for ever, since both ends of a connection are on it."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0)
        assert found or timeout == 0, "everybody waits for somebody else"
        return found


class Clock(asyncio.SelectorEventLoop):
    now = 0.0

    def __init__(self) -> None:
        super().__init__(Selector())

    def time(self) -> float:
        return self.now


def on_clock(test: Callable[..., Coroutine[object, object, None]]) -> Callable[..., None]:
    """Return a test without its first argument, for which it gets a loop whose clock stands still."""

    def run(**arguments: object) -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, Clock)
            runner.run(test(loop, **arguments))

    signature = inspect.signature(test)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]  # by which pytest knows the arguments
        parameters=list(signature.parameters.values())[1:], return_annotation=None
    )
    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


class Client:
    def __init__(self, loop: Clock, sock: socket.socket, connection: Connection):
        self._loop = loop
        self._sock = sock
        self.connection = connection

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await self._loop.sock_sendall(self._sock, data)

    async def receive(self) -> bytes:
        """Return the bytes that come next; empty once the connection has ended."""
        try:
            return await self._loop.sock_recv(self._sock, 65536)
        except ConnectionResetError:
            return b""

    async def until(self, end: bytes) -> bytes:
        answer = b""
        while not answer.endswith(end):
            data = await self.receive()
            assert data, answer
            answer += data
        return answer

    async def rest(self) -> bytes:
        answer = b""
        while data := await self.receive():
            answer += data
        return answer

    def end(self) -> None:
        """Send nothing more, and go on receiving."""
        self._sock.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        self._sock.close()

    def unsent(self) -> int:
        return self.connection.transport.get_write_buffer_size()


@contextlib.asynccontextmanager
async def connected(loop: Clock, app: ASGIApp) -> AsyncIterator[Client]:
    config = Config(app, log_config=None, lifespan="off", ws="none", access_log=False)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    made = connection_class(LIMITS)
    _, connection = await loop.connect_accepted_socket(lambda: made(config, ServerState(), {}), theirs)
    try:
        yield Client(loop, ours, connection)
    finally:
        ours.close()
        if connection in connection.connections:
            connection.transport.abort()
        while connection.tasks:
            await asyncio.sleep(0)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the number of headers and the length of the body."""
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        if not message["more_body"]:
            break
    headers = [(b"content-length", b"8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"%03d%05d" % (len(scope["headers"]), size % 100_000)})


class Endless:
    """An application that begins an answer if it should and then waits until its client is gone."""

    def __init__(self, *, begins: bool):
        self._begins = begins
        self.runs = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.runs += 1
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left.set()


class Large:
    size = 20_000_000

    def __init__(self, size: int = size):
        self.size = size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"%d" % self.size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"x" * self.size})


async def take_some(client: Client) -> int:
    """Receive until the connection has less to send than before; return the number of bytes received."""
    taken, before = 0, client.unsent()
    while client.unsent() == before:
        taken += len(await client.receive())
    return taken


class Held:
    """An application that begins an answer if it should and ends it when it is told to."""

    def __init__(self, *, begins: bool = True):
        self._begins = begins
        self.go = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self._begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        await self.go.wait()
        if not self._begins:
            await send(start)
        await send({"type": "http.response.body", "body": b"ended"})


async def until_probed(loop: Clock, client: Client) -> None:
    """Moves the clock until the connection has been lost, or a client that is there has been probed often."""
    for _ in range(10):
        for _ in range(10):
            await asyncio.sleep(0)
        loop.now += PROBE_SECONDS
    for _ in range(10):
        await asyncio.sleep(0)
