"""Reading request bodies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from starlette.requests import Request

from mlx_tandem.server.body import SMALL_BODY, BodyLimit, read_json


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
