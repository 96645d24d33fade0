"""Connections whose client sends nothing more, and timers of connections."""

from __future__ import annotations

import asyncio
import json

import httptools
import pytest
from starlette.types import Receive, Scope, Send

from mlx_tandem.config import ServerConfig
from mlx_tandem.server.connection import MAX_HEAD, connection_class
from mlx_tandem.server.connection_timers import MAX_ZEROS
from tests.unit.server.clock import (
    BODY,
    CHUNKED,
    GET,
    POST,
    WHOLE,
    Clock,
    Endless,
    Held,
    connected,
    echo,
    on_clock,
    until_probed,
)


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


@pytest.mark.promise("C9")
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("request_", list(WHOLE), ids=range(len(WHOLE)))
@on_clock
async def test_who_sends_nothing_more_gets_the_whole_answer(loop, request_, begins):
    app = Held(begins=begins)
    async with connected(loop, app) as client:
        await client.send(request_)
        client.end()
        await until_probed(loop, client)
        app.go.set()
        answers = Answers(await client.rest())
        assert [s for s in answers.statuses if s != 100] == [200]
        assert answers.bodies[-1] == (b"begunended" if begins else b"ended")


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
@on_clock
async def test_who_is_gone_is_noticed(loop, begins, together):
    """The end of what it sends is the same as that of a client which still receives."""
    app = Endless(begins=begins)
    async with connected(loop, app) as client:
        await client.send(GET)
        if not together:
            while not app.runs:
                await asyncio.sleep(0)
        client.leave()
        await until_probed(loop, client)
        await app.left.wait()


@pytest.mark.parametrize("sent", [POST + b"Content-Length: 9\r\n\r\nabc", CHUNKED[:-3], GET + BODY[:-1]])
@on_clock
async def test_half_a_body_is_no_request(loop, sent):
    """Its client can get no answer to it, and what waits for the rest of it is told."""
    async with connected(loop, echo) as client:
        await client.send(sent)
        client.end()
        assert (await client.rest()).count(b"HTTP/1.1 200") == sent.count(b"GET")
        while client.connection.tasks:
            await asyncio.sleep(0)


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
@on_clock
async def test_what_is_no_request_takes_no_answer_from_whole_ones_before_it(loop, behind, refused):
    """Several wait while the first is answered, and only the last of them is dropped."""
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
