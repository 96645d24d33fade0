"""Reading request bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from mlx_tandem.dialects.route import PLAIN
from mlx_tandem.errors import TandemError
from mlx_tandem.server.body import SMALL_BODY, BodyLimit, read_json, refusal_headers


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
            assert (await read_json(request(large), Body, limit)).prompt == text
            return turns

        limit = BodyLimit(1 << 20, 30.0)
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
    try:
        found = asyncio.run(read_json(made, dict[str, Any], BodyLimit(limit, 30.0), others=others, optional=optional))
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
    assert read(b"", JSON, optional=True)[0] == read(b"", others=PLAIN, optional=True)[0] == {}


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
