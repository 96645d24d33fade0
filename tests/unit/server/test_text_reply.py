"""Replies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from mlx_tandem.errors import Overloaded
from mlx_tandem.generation import text_admission
from mlx_tandem.generation.text_admission import LEAST, PLACES, TextAdmission
from mlx_tandem.server.body import BodyLimit
from mlx_tandem.server.receiving import SMALL_BODY, Receiving
from mlx_tandem.server.text_reply import TextReply


class Body(msgspec.Struct):
    prompt: str


def test_a_long_reply_to_a_short_request_counts_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise many slow readers would take memory without a limit."""
    monkeypatch.setattr(text_admission, "MAX_WAITING_TEXT", 10 * LEAST)
    admission = TextAdmission(Counter())
    front: Any = SimpleNamespace(client=SimpleNamespace(check_ready=lambda: None), text_admission=admission)
    body = b'{"prompt": "a"}'

    def is_refused() -> bool:
        try:
            with admission.admitted(1):
                return False
        except Overloaded:
            return True

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def reply(length: int) -> list[bool]:
        """Whether another request is refused while each message of a reply of so many bytes is sent."""
        refused: list[bool] = []

        async def work(front: Any, body: Body) -> list[bytes]:
            return [b"x" * length]

        async def send(message: MutableMapping[str, Any]) -> None:
            refused.append(is_refused())

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        request = Request({"type": "http", "method": "POST", "headers": headers}, receive)
        limit = BodyLimit(1 << 20, 30.0, Receiving(1 << 20, Counter()))
        await TextReply(front, request, Body, limit, work)(request.scope, receive, send)
        return refused

    assert not any(asyncio.run(reply(LEAST)))
    assert all(asyncio.run(reply(10 * LEAST)))
    assert not is_refused(), "what was sent counts no more"


def test_a_text_alone_is_admitted_and_others_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_admission, "MAX_WAITING_TEXT", 10 * LEAST)
    refused: Counter[str] = Counter()
    admission = TextAdmission(refused)
    with admission.admitted(20 * LEAST), pytest.raises(Overloaded), admission.admitted(1):
        pass
    with admission.admitted(9 * LEAST), admission.admitted(1), pytest.raises(Overloaded), admission.admitted(1):
        pass
    with admission.admitted(9 * LEAST), pytest.raises(Overloaded), admission.admitted(LEAST + 1):
        pass
    assert refused == {text_admission.WAITING_TEXT: 3}


def test_a_request_counts_by_its_length_and_a_long_one_waits_for_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is what its header says, or else the most that it may be."""
    limit = BodyLimit(4 * SMALL_BODY, 30.0, Receiving(1 << 30, Counter()))
    seen: dict[str, tuple[int, bool]] = {}

    async def run() -> None:
        admission = TextAdmission(Counter())
        front: Any = SimpleNamespace(client=SimpleNamespace(check_ready=lambda: None), text_admission=admission)

        async def ask(name: str, body: bytes, *headers: tuple[bytes, bytes]) -> None:
            """Note how much a request counts while it is worked on, and whether it then has a place."""

            async def receive() -> dict[str, Any]:
                if body_was_sent:
                    await asyncio.Event().wait()
                body_was_sent.append(True)
                return {"type": "http.request", "body": body, "more_body": False}

            async def send(message: MutableMapping[str, Any]) -> None:
                pass

            async def work(front: Any, decoded: Body) -> list[bytes]:
                seen[name] = admission._bytes, admission._places._value < PLACES
                return [b"1"]

            body_was_sent: list[bool] = []
            scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json"), *headers]}
            request = Request(scope, receive)
            await TextReply(front, request, Body, limit, work)(request.scope, receive, send)
            assert (admission._bytes, admission._places._value) == (0, PLACES), "all is given back"

        def length(size: int) -> tuple[bytes, bytes]:
            return b"content-length", b"%d" % size

        short, long = b'{"prompt": "a"}', b'{"prompt": "%b"}' % (b"a" * SMALL_BODY)
        await ask("short", short, length(len(short)))
        await ask("small", short, length(SMALL_BODY))
        await ask("large", short, length(SMALL_BODY + 1))
        await ask("long", long, length(len(long)))
        await ask("unknown", short)
        await ask("odd", short, (b"content-length", b"x"))
        await ask("huge", short, length(4 * SMALL_BODY))

    asyncio.run(run())
    assert seen == {
        "short": (LEAST, False),
        "small": (SMALL_BODY, False),
        "large": (SMALL_BODY + 1, True),
        "long": (SMALL_BODY + len(b'{"prompt": ""}'), True),
        "unknown": (limit.size, True),
        "odd": (limit.size, True),
        "huge": (limit.size, True),
    }


def test_few_long_texts_have_a_place_at_once() -> None:
    async def run() -> None:
        admission, places = TextAdmission(Counter()), AsyncExitStack()
        async with places:
            for _ in range(PLACES):
                await places.enter_async_context(admission.place(1))
            waiting = asyncio.create_task(places.enter_async_context(admission.place(1)))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
            await places.pop_all().aclose()
            await waiting

    asyncio.run(asyncio.wait_for(run(), 20))
