"""Reading request bodies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from mlx_tandem.dialects.route import PLAIN
from mlx_tandem.errors import Overloaded, TandemError
from mlx_tandem.server.body import BodyLimit, read_json, refusal_headers
from mlx_tandem.server.receiving import RECEIVING, RESERVE, SMALL_BODY, Incoming, Receiving


class Body(msgspec.Struct):
    prompt: str


def request(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    return Request(scope, receive)


def test_the_loop_turns_between_large_bodies_that_came_at_once() -> None:
    async def run() -> list[int]:
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def read() -> int:
            with limit.receiving.body() as incoming:
                assert (await read_json(request(large), Body, limit, incoming)).prompt == text
            return turns

        limit = BodyLimit(1 << 20, 30.0, Receiving(1 << 20, Counter()))
        counting = asyncio.create_task(count())
        seen = await asyncio.gather(*(read() for _ in range(8)))
        counting.cancel()
        return seen

    text = "x" * SMALL_BODY
    large = json.dumps({"prompt": text}).encode()
    seen = asyncio.run(run())
    assert seen == sorted(set(seen)), "each was decoded in a turn of its own"


JSON = (b"content-type", b"application/json")
FORM = (b"content-type", b"application/x-www-form-urlencoded")


def read(
    body: bytes,
    *headers: tuple[bytes, bytes],
    limit: int = 100,
    cut: tuple[int, ...] = (),
    others: Collection[str] = (),
    optional: bool = False,
) -> tuple[Any, int]:
    """What is made of a body, or the status of the refusal; and how many of its pieces were taken."""
    ends = [*cut, len(body)]
    pieces = [body[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    taken = 0

    async def receive() -> dict[str, Any]:
        nonlocal taken
        taken += 1
        return {"type": "http.request", "body": pieces[taken - 1], "more_body": taken < len(pieces)}

    made = Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)
    receiving = Receiving(1 << 20, Counter())
    try:
        with receiving.body() as incoming:
            kept = BodyLimit(limit, 30.0, receiving)
            found = asyncio.run(read_json(made, dict[str, Any], kept, incoming, others=others, optional=optional))
    except TandemError as e:
        return e.status, taken
    return found, taken


def sized(size: int) -> bytes:
    return b'{"a": "%b"}' % (b"x" * (size - len(b'{"a": ""}')))


def length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % size


def test_the_largest_body() -> None:
    """Its length is counted as it comes, and believed only where it is too large already."""
    largest, larger = sized(100), sized(101)
    for headers in ((JSON,), (JSON, length(100)), (JSON, length(1)), (JSON, (b"content-length", b"+9"))):
        assert read(largest, *headers) == (json.loads(largest), 1)
        assert read(largest, *headers, cut=(1, 50)) == (json.loads(largest), 3)
        assert read(larger, *headers) == (413, 1)
        assert read(larger + b" " * 50, *headers, cut=(50, 101, 120)) == (413, 2), "the rest is not taken"
    assert read(larger, JSON, length(101)) == (413, 0), "nothing of it is taken"
    assert read(largest, JSON, (b"content-length", b"9" * 30)) == (413, 0)


@pytest.mark.parametrize(
    ("headers", "usual", "plain"),
    [
        ((JSON,), 200, 200),
        (((b"content-type", b"Application/JSON; charset=utf-8"),), 200, 200),
        ((FORM,), 415, 200),
        ((), 415, 200),
        (((b"content-type", b""),), 415, 200),
        ((FORM, (b"origin", b"http://x")), 415, 415),
        (((b"origin", b"http://x"),), 415, 415),
        ((JSON, (b"origin", b"http://x")), 200, 200),
        (((b"content-type", b"text/plain"),), 415, 415),
        (((b"content-type", b"application/jsonx"),), 415, 415),
        ((JSON, (b"content-encoding", b"gzip")), 415, 415),
        ((JSON, (b"content-encoding", b"Identity")), 200, 200),
        ((FORM, (b"content-encoding", b"br")), 415, 415),
    ],
)
def test_the_media_type(headers: tuple[tuple[bytes, bytes], ...], usual: int, plain: int) -> None:
    """curl's own types pass on routes that take them, but not from a web page, whose requests have an origin."""
    body = b'{"a": 1}'
    assert read(body, *headers)[0] == ({"a": 1} if usual == 200 else usual)
    assert read(body, *headers, others=PLAIN)[0] == ({"a": 1} if plain == 200 else plain)


def test_other_media_types_are_those_of_the_route() -> None:
    octets = (b"content-type", b"application/octet-stream")
    for others, found in (((), 415), (PLAIN, 415), (PLAIN | {"application/octet-stream"}, {"a": 1})):
        assert read(b'{"a": 1}', octets, others=others)[0] == found
    assert read(b'{"a": 1}', octets, (b"origin", b"http://x"), others=("application/octet-stream",))[0] == 415


def test_a_body_that_is_missing() -> None:
    assert read(b"", JSON)[0] == 400
    assert read(b"", JSON, others=PLAIN)[0] == read(b"", others=PLAIN)[0] == 400
    assert read(b"", JSON, optional=True)[0] == read(b"", optional=True)[0] == {}
    assert read(b"{}", optional=True)[0] == 415, "a body needs its content type"
    assert read(b"", (b"origin", b"http://x"), optional=True)[0] == 415, "a web page might have sent it"
    assert read(b"", FORM, optional=True)[0] == 415


@pytest.mark.parametrize(
    ("headers", "much"),
    [
        ((), False),
        ((length(SMALL_BODY),), False),
        ((length(SMALL_BODY + 1),), True),
        (((b"content-length", b"x"),), True),
        (((b"content-length", b"9" * 30),), True),
        (((b"transfer-encoding", b"chunked"),), True),
        (((b"expect", b"100-continue"), length(1)), True),
    ],
)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 408, 413, 415, 429, 500, 503])
def test_a_connection_ends_where_a_refusal_leaves_much_of_a_body(
    headers: tuple[tuple[bytes, bytes], ...], much: bool, status: int
) -> None:
    error = TandemError("no")
    error.status = status
    ends = status in (408, 413, 415) or (status in (401, 403, 429, 503) and much)
    assert refusal_headers(error, headers) == ([(b"connection", b"close")] if ends else [])


# --- the limit on the bytes of all bodies -----------------------------------------------------------------------------

LARGE = SMALL_BODY + 1


class Arrivals:
    """Bodies that arrive piece by piece, on a clock that a test moves."""

    def __init__(self, most: int):
        self.now = 0.0
        self.refused: Counter[str] = Counter()
        self.receiving = Receiving(most, self.refused, lambda: self.now)
        self._stack = ExitStack()

    def body(self, *pieces: int) -> Incoming:
        body = self._stack.enter_context(self.receiving.body())
        for piece in pieces:
            body.grow(piece)
        return body


def test_the_slowest_large_body_gives_way() -> None:
    arrivals = Arrivals(4 * LARGE + 1000)
    arrivals.now = 1.0
    stalled = arrivals.body(LARGE)
    arrivals.now = 2.0
    slow, small = arrivals.body(LARGE), arrivals.body(SMALL_BODY)
    arrivals.now = 3.0
    fast = arrivals.body(LARGE)
    slow.grow(1000)
    assert stalled.lost is None
    fast.grow(LARGE)
    assert stalled.lost is not None
    assert (stalled.lost.status, stalled.lost.retry_after) == (429, 1.0)
    assert (slow.lost, small.lost, fast.lost) == (None, None, None)
    with pytest.raises(Overloaded):
        stalled.grow(1)
    assert arrivals.refused == {RECEIVING: 1}


def test_a_body_that_has_arrived_gives_way_to_none() -> None:
    arrivals = Arrivals(2 * LARGE)
    whole = [arrivals.body(LARGE), arrivals.body(LARGE)]
    for body in whole:
        body.complete()
    with pytest.raises(Overloaded):
        arrivals.body(LARGE)
    assert [body.lost for body in whole] == [None, None]
    assert arrivals.receiving.bytes == 2 * LARGE
    assert arrivals.body(SMALL_BODY).lost is None, "small bodies have a reserve"


def test_the_oldest_small_body_gives_way_where_there_are_small_ones_only() -> None:
    arrivals = Arrivals(0)
    bodies = [arrivals.body(SMALL_BODY) for _ in range(RESERVE // SMALL_BODY)]
    newest = arrivals.body(1)
    assert bodies[0].lost is not None
    assert [body.lost for body in (*bodies[1:], newest)] == [None] * len(bodies)


def test_a_body_that_gives_way_is_refused_while_it_waits() -> None:
    async def run() -> TandemError:
        receiving = Receiving(2 * LARGE, Counter())
        begun = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not begun.is_set():
                begun.set()
                return {"type": "http.request", "body": b" " * LARGE, "more_body": True}
            return await asyncio.get_running_loop().create_future()

        async def read() -> None:
            with receiving.body() as incoming:
                await read_json(Request(scope, receive), Body, BodyLimit(1 << 20, 1e6, receiving), incoming)

        scope = {"type": "http", "method": "POST", "headers": [JSON]}
        reading = asyncio.create_task(read())
        await begun.wait()
        await asyncio.sleep(0)
        with receiving.body() as other:
            other.grow(2 * LARGE)
            with pytest.raises(TandemError) as found:
                await asyncio.wait_for(reading, 20)
            assert receiving.bytes == 2 * LARGE
        assert receiving.bytes == 0
        return found.value

    error = asyncio.run(run())
    assert (error.status, error.code) == (429, "rate_limit_exceeded")


@pytest.mark.promise("C11")
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2 * LARGE), st.integers(0, 3)), max_size=60))
def test_the_bytes_of_all_bodies_stay_within_the_limit(steps: list[tuple[int, int, int]]) -> None:
    most = 3 * LARGE
    clock = iter(range(1000))
    receiving = Receiving(most, Counter(), lambda: float(next(clock)))
    stacks: dict[int, ExitStack] = {}
    bodies: dict[int, Incoming] = {}
    for name, size, what in steps:
        if what == 0 and name in bodies:
            stacks.pop(name).close()
            del bodies[name]
        elif what == 1 and name in bodies:
            if bodies[name].lost is None:
                bodies[name].complete()
        else:
            if name not in bodies:
                stacks[name] = ExitStack()
                bodies[name] = stacks[name].enter_context(receiving.body())
            was_alone = len(bodies) == 1
            try:
                bodies[name].grow(size)
            except Overloaded:
                assert not was_alone or bodies[name].lost is not None
        alive = [body for body in bodies.values() if body.lost is None]
        assert receiving.bytes == sum(body.size for body in bodies.values())
        assert all(body.size == 0 for body in bodies.values() if body.lost is not None)
        assert sum(body.size for body in alive if body.size > SMALL_BODY) <= most
        assert receiving.bytes <= most + RESERVE
    for stack in stacks.values():
        stack.close()
    assert receiving.bytes == 0
