"""Replies of `/tokenize` and `/detokenize`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from mlx_tandem.errors import Overloaded
from mlx_tandem.generation import text_admission
from mlx_tandem.generation.text_admission import LEAST, TextAdmission
from mlx_tandem.server.body import BodyLimit
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
        await TextReply(front, request, Body, BodyLimit(1 << 20, 30.0), work)(request.scope, receive, send)
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
