"""One connection over a real socket, on an event loop whose clock stands still until a test moves it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import ServerState

from mlx_tandem.config import ServerConfig
from mlx_tandem.server.connection import MAX_HEAD, Connection, connection_class
from mlx_tandem.server.connection_timers import MAX_ZEROS, PROBE_SECONDS

POST = b"POST / HTTP/1.1\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
GET = b"GET / HTTP/1.1\r\n\r\n"
LIMITS = ServerConfig()


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


def on_clock(test: Callable[[Clock], Coroutine[object, object, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            loop = runner.get_loop()
            assert isinstance(loop, Clock)
            runner.run(test(loop))

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
        """Empty once the connection has ended."""
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
    """The length of the body, and how many headers came before it."""
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
    """Bytes that the client has received by the time the connection has less to send than before."""
    taken, before = 0, client.unsent()
    while client.unsent() == before:
        taken += len(await client.receive())
    return taken


@on_clock
async def test_a_large_answer_over_a_slow_link_comes_whole(loop):
    """Some of it is taken before each look at the connection, also long after the answer is complete."""
    async with connected(loop, Large()) as client:
        await client.send(GET)
        while not client.unsent():
            await asyncio.sleep(0)
        taken = 0
        for _ in range(10):
            taken += await take_some(client)
            loop.now += LIMITS.write_timeout_s + 1
            for _ in range(3):  # the loop sees to what is due
                await asyncio.sleep(0)
        taken += len(await client.rest())
        assert taken > Large.size


@on_clock
async def test_who_takes_some_and_then_nothing_is_cut(loop):
    async with connected(loop, Large()) as client:
        await client.send(GET)
        while not client.unsent():
            await asyncio.sleep(0)
        taken = await take_some(client)
        while not client.connection.transport.is_closing() or client.unsent():
            loop.now += LIMITS.write_timeout_s + 1
            await asyncio.sleep(0)
        assert taken + len(await client.rest()) < Large.size


@on_clock
async def test_an_answer_that_ends_the_connection_is_not_kept_for_who_takes_nothing(loop):
    """What is left of it is too little for the transport to say that it waits."""
    async with connected(loop, Large()) as client:
        await client.send(GET)
        while not client.unsent():
            await asyncio.sleep(0)
        room = Large.size - client.unsent()  # in the socket
    async with connected(loop, Large(room + 30_000)) as client:
        await client.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        while not client.unsent():
            await asyncio.sleep(0)
        assert not client.connection.flow.write_paused
        loop.now += LIMITS.write_timeout_s + 1
        for _ in range(10):
            await asyncio.sleep(0)
        assert not client.unsent()


@on_clock
async def test_who_takes_all_but_the_end_of_an_answer_that_ends_the_connection_is_cut(loop):
    async with connected(loop, Large()) as client:
        sock = client.connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # so that the answer leaves in small pieces
        await client.send(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
        while not client.connection.transport.is_closing():
            await asyncio.sleep(0)
        assert client.connection.flow.write_paused
        while client.connection.flow.write_paused:
            await client.receive()
        assert client.unsent()
        for _ in range(2):  # at the first look at it, the client has received something
            loop.now += LIMITS.write_timeout_s + 1
            for _ in range(10):
                await asyncio.sleep(0)
        assert not client.unsent()


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 20_000, b"a: " + b"b" * 1_000_000 + b"\r\n"], ids=["many", "long"])
def test_trailers_without_measure(trailers):
    @on_clock
    async def run(loop):
        async with connected(loop, echo) as client:
            for i in range(0, len(trailers), 10_000):
                await client.send((CHUNKED if not i else b"") + trailers[i : i + 10_000])
            await client.send(b"\r\n")
            answer = await client.rest()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 431")

    run()


@on_clock
async def test_a_trailer_that_does_not_end(loop):
    async with connected(loop, echo) as client:
        await client.send(CHUNKED + b"a: ")
        sent = 0
        while not client.connection.transport.is_closing():
            await client.send(b"b" * 1000)
            sent += 1000
            assert sent < 10 * MAX_HEAD
            await asyncio.sleep(0)


@on_clock
async def test_a_head_in_one_piece_has_the_same_limit(loop):
    async with connected(loop, echo) as client:
        await client.send(b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 12_000 + b"\r\n")
        answer = await client.rest()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


@on_clock
async def test_a_trailer_is_no_header(loop):
    async with connected(loop, echo) as client:
        await client.send(CHUNKED + b"Host: a\r\nAuthorization: b\r\n\r\n")
        assert (await client.until(b"00001"))[-8:-5] == b"001"


@on_clock
async def test_the_end_of_a_body_does_not_count_for_the_next_head(loop):
    """The connection sees both in one piece."""
    async with connected(loop, echo) as client:
        body = b"x" * (2 * MAX_HEAD)
        head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
        client.connection.data_received(head + body + GET[:9])
        await client.until(b"%05d" % (len(body) % 100_000))
        await client.send(GET[9:])
        assert (await client.until(b"00000")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("together", [True, False])
def test_who_leaves_with_requests_ahead_is_noticed(together):
    @on_clock
    async def run(loop):
        app = Endless(begins=False)
        async with connected(loop, app) as client:
            if together:
                await client.send(GET * 3)
            else:
                for _ in range(3):
                    await client.send(GET)
                    for _ in range(10):
                        await asyncio.sleep(0)
            while not client.connection.pipeline:
                await asyncio.sleep(0)
            client.leave()
            await until_probed(loop, client)
            await app.left.wait()
            assert app.runs == 1

    run()


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\na: " + b"b" * 10 * MAX_HEAD, 431)],
    ids=["nonsense", "long"],
)
def test_a_refusal_comes_behind_the_answer_that_is_due(sent, status):
    @on_clock
    async def run(loop):
        app = Held()
        async with connected(loop, app) as client:
            await client.send(GET)
            await client.until(b"begun\r\n")
            await client.send(sent)
            app.go.set()
            rest = await client.rest()
            assert rest.startswith(b"5\r\nended\r\n0\r\n\r\nHTTP/1.1 %d" % status)
            assert rest.count(b"HTTP/1.1") == 1

    run()


@on_clock
async def test_who_leaves_behind_nonsense_is_noticed(loop):
    app = Endless(begins=True)
    async with connected(loop, app) as client:
        await client.send(GET + b"nonsense\r\n\r\n")
        await client.until(b"begun\r\n")
        client.leave()
        await until_probed(loop, client)
        await app.left.wait()


BODY = POST + b"Content-Length: 3\r\n\r\nabc"
WHOLE = {GET: b"00000", BODY: b"00003", CHUNKED + b"\r\n": b"00001", POST + b"\r\n": b"00000"}
"""Requests and what `echo` answers."""

BEHIND = [b"nonsense\r\n\r\n", b"\x00", b"{}", b"GET / HTTP/9.9\r\n\r\n", CHUNKED[:-3] + b"nonsense\r\n"]
"""What is no request, behind requests."""


@given(st.lists(st.sampled_from(list(WHOLE)), min_size=1, max_size=6), st.sampled_from(BEHIND), st.data())
def test_requests_before_nonsense_are_answered(requests, behind, data):
    """However what is sent is cut into pieces."""
    sent = b"".join(requests) + behind
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=4)))

    @on_clock
    async def run(loop):
        async with connected(loop, echo) as client:
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                await client.send(sent[begin:end])
                for _ in range(3):
                    await asyncio.sleep(0)
            answers = (await client.rest()).split(b"HTTP/1.1 ")[1:]
            assert [a[:3] for a in answers] == [b"200"] * len(requests) + [b"400"]
            assert [a[-5:] for a in answers[:-1]] == [WHOLE[r] for r in requests]

    run()


# -- clients that send nothing more ------------------------------------------------------------------------------------


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


class Answers:
    """A client's parser, as strict as most: what it makes of the bytes that it receives."""

    def __init__(self, received: bytes):
        self.bodies: list[bytes] = []
        self.statuses: list[int] = []
        parser = httptools.HttpResponseParser(self)
        self._parser = parser
        parser.feed_data(received)

    def on_headers_complete(self) -> None:
        self.statuses.append(self._parser.get_status_code())
        self.bodies.append(b"")

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("request_", list(WHOLE), ids=range(len(WHOLE)))
def test_who_sends_nothing_more_gets_the_whole_answer(request_, begins):
    @on_clock
    async def run(loop):
        app = Held(begins=begins)
        async with connected(loop, app) as client:
            await client.send(request_)
            client.end()
            await until_probed(loop, client)
            app.go.set()
            answers = Answers(await client.rest())
            assert [s for s in answers.statuses if s != 100] == [200]
            assert answers.bodies[-1] == (b"begunended" if begins else b"ended")

    run()


@on_clock
async def test_an_answer_that_comes_soon_has_nothing_before_it(loop):
    async with connected(loop, echo) as client:
        await client.send(GET * 3)
        client.end()
        answer = await client.rest()
        assert answer.count(b"HTTP/1.1 200") == 3
        assert answer.count(b"HTTP/1.1") == 3


@on_clock
async def test_probes_do_not_make_a_chunk_size_too_long(loop):
    app = Held()
    async with connected(loop, app) as client:
        await client.send(GET)
        client.end()
        await client.until(b"begun\r\n")
        for _ in range(5):
            await until_probed(loop, client)
        app.go.set()
        assert await client.rest() == b"0" * MAX_ZEROS + b"5\r\nended\r\n0\r\n\r\n"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_who_is_gone_is_noticed(begins, together):
    """The end of what it sends is the same as that of a client which still receives."""

    @on_clock
    async def run(loop):
        app = Endless(begins=begins)
        async with connected(loop, app) as client:
            await client.send(GET)
            if not together:
                while not app.runs:
                    await asyncio.sleep(0)
            client.leave()
            await until_probed(loop, client)
            await app.left.wait()

    run()


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 9\r\n\r\nabc", CHUNKED[:-3], GET + BODY[:-1]])
def test_half_a_body_is_no_request(sent):
    """Its client can get no answer to it, and what waits for the rest of it is told."""

    @on_clock
    async def run(loop):
        async with connected(loop, echo) as client:
            await client.send(sent)
            client.end()
            assert (await client.rest()).count(b"HTTP/1.1 200") == sent.count(b"GET")
            while client.connection.tasks:
                await asyncio.sleep(0)

    run()


@on_clock
async def test_half_a_body_behind_an_answer_that_is_due_is_no_request(loop):
    scopes = []
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await go.wait()
        await echo(scope, receive, send)

    async with connected(loop, slow) as client:
        await client.send(GET + BODY[:-1])
        while not client.connection.pipeline:
            await asyncio.sleep(0)
        client.end()
        while client.connection.pipeline and not client.connection._ended:
            await asyncio.sleep(0)
        go.set()
        assert (await client.rest()).count(b"HTTP/1.1 200") == 1
        assert [scope["method"] for scope in scopes] == ["GET"]
        while client.connection.tasks:
            await asyncio.sleep(0)


@pytest.mark.parametrize(("behind", "refused"), [(CHUNKED[:-3] + b"nonsense\r\n", [b"400"]), (BODY[:-1], [])])
def test_what_is_no_request_takes_no_answer_from_whole_ones_before_it(behind, refused):
    """Several wait while the first is answered, and only the last of them is dropped."""

    @on_clock
    async def run(loop):
        go = asyncio.Event()

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await go.wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": scope["method"].ljust(4).encode()})

        async with connected(loop, slow) as client:
            await client.send(GET + GET + behind)
            client.end()
            while not client.connection._ended:
                await asyncio.sleep(0)
            go.set()
            answers = (await client.rest()).split(b"HTTP/1.1 ")[1:]
            assert [a[:3] for a in answers] == [b"200", b"200", *refused]
            assert [a[-4:] for a in answers[:2]] == [b"GET ", b"GET "]

    run()


@on_clock
async def test_the_end_of_an_http_1_0_client_is_its_leaving(loop):
    app = Endless(begins=False)
    async with connected(loop, app) as client:
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        client.end()
        assert await client.rest() == b""
        await app.left.wait()


@on_clock
async def test_a_body_that_is_not_http_is_refused_before_its_answer(loop):
    async with connected(loop, echo) as client:
        await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\nnonsense\r\n")
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 400")
        assert answer.count(b"HTTP/1.1") == 1


@on_clock
async def test_each_of_many_requests_has_a_head_of_its_own(loop: Clock) -> None:
    """Together their heads are larger than one may be."""
    request = POST + b"x: " + b"x" * (MAX_HEAD // 4) + b"\r\nContent-Length: 0\r\n\r\n"
    async with connected(loop, echo) as client:
        for _ in range(2):
            sending = asyncio.create_task(client.send(request * 6))
            answers = b""
            while answers.count(b"HTTP/1.1 200 OK") < 6 or not answers.endswith(b"00200000"):
                answers += await client.receive()
            await sending
            assert b"HTTP/1.1 4" not in answers


@on_clock
async def test_no_timer_outlives_a_connection(loop: Clock) -> None:
    app = Endless(begins=True)
    async with connected(loop, app) as client:
        await client.send(GET)
        await client.until(b"begun\r\n")
        connection = client.connection
        timers = (connection._receiving, connection._reader._timer, connection._probes._timer)
        for timer in timers:
            timer.start()
        connection.transport.abort()
        await app.left.wait()
        assert not any(timer.is_running for timer in timers)


@on_clock
async def test_only_plain_connections_can_be_closed_by_halves(loop: Clock) -> None:
    for scheme, stays in (("http", True), ("https", False)):
        app = Endless(begins=True)
        async with connected(loop, app) as client:
            client.connection.scheme = scheme
            await client.send(GET)
            await client.until(b"begun\r\n")
            assert client.connection.eof_received() == stays
            assert client.connection._probes._timer.is_running == stays


def test_the_limits_are_those_of_the_settings() -> None:
    made = connection_class(ServerConfig(receive_timeout_s=3.0, write_timeout_s=7.0))
    assert (made.receive_seconds, made.write_seconds) == (3.0, 7.0)


@on_clock
async def test_a_refusal_says_that_the_connection_ends(loop: Clock) -> None:
    async with connected(loop, echo) as client:
        await client.send(b"nonsense\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert status == "HTTP/1.1 400 Bad Request"
    assert headers.pop("x-request-id").startswith("req-")
    assert headers == {
        "content-type": "application/json",
        "connection": "close",
        "content-length": str(len(body)),
    }
    assert json.loads(body)["error"]["message"] == "this is not an HTTP request"
