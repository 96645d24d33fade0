"""Heads, bodies, trailers and slow clients on one connection."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.server.connection import MAX_HEAD
from tests.unit.server.clock import (
    CHUNKED,
    GET,
    LIMITS,
    POST,
    WHOLE,
    Endless,
    Held,
    Large,
    connected,
    echo,
    on_clock,
    take_some,
    until_probed,
)


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


@pytest.mark.promise("FLT-42")
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
@on_clock
async def test_trailers_without_measure(loop, trailers):
    async with connected(loop, echo) as client:
        for i in range(0, len(trailers), 10_000):
            await client.send((CHUNKED if not i else b"") + trailers[i : i + 10_000])
        await client.send(b"\r\n")
        answer = await client.rest()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")


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


@pytest.mark.promise("C3")
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
@on_clock
async def test_who_leaves_with_requests_ahead_is_noticed(loop, together):
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


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\na: " + b"b" * 10 * MAX_HEAD, 431)],
    ids=["nonsense", "long"],
)
@on_clock
async def test_a_refusal_comes_behind_the_answer_that_is_due(loop, sent, status):
    app = Held()
    async with connected(loop, app) as client:
        await client.send(GET)
        await client.until(b"begun\r\n")
        await client.send(sent)
        app.go.set()
        rest = await client.rest()
        assert rest.startswith(b"5\r\nended\r\n0\r\n\r\nHTTP/1.1 %d" % status)
        assert rest.count(b"HTTP/1.1") == 1


@on_clock
async def test_who_leaves_behind_nonsense_is_noticed(loop):
    app = Endless(begins=True)
    async with connected(loop, app) as client:
        await client.send(GET + b"nonsense\r\n\r\n")
        await client.until(b"begun\r\n")
        client.leave()
        await until_probed(loop, client)
        await app.left.wait()


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
