"""A conversation with a model of a server: its messages, and the requests that continue it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from mlx_tandem.cli.adapters import message_of
from mlx_tandem.http_client import Connection, Events, HttpError

MOST_ERROR_BYTES = 1 << 16
"""Bytes of an answer that is kept in case it is an error."""


class Refused(Exception):
    """The server did not answer with a text; the message says why, and `status` is that of the answer."""

    def __init__(self, message: str, status: int = 200):
        super().__init__(message)
        self.status = status


@dataclass
class Answer:
    """An answer of a model, as far as it has come."""

    text: str = ""
    finish_reason: str = ""  # empty until the model has ended
    tokens: int = 0


@dataclass
class Conversation:
    """The messages that were exchanged with the models of one server.

    `options` are fields of each request, such as `temperature`. A question that fails leaves the messages as they were.
    """

    connection: Connection
    model: str
    system: str = ""
    options: Mapping[str, object] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    async def models(self) -> list[str]:
        """Return the names that the server has for its base model, adapters and aliases. Raise Refused, HttpError."""
        status, listing = await self.connection.json("GET", "/v1/models")
        if status >= 300 or not isinstance(listing, dict) or not isinstance(listing.get("data"), list):
            raise Refused(f"the server answered with {status}: {message_of(listing)}")
        return [str(entry["id"]) for entry in listing["data"] if isinstance(entry, dict) and "id" in entry]

    async def choose(self, name: str) -> None:
        """Let this model, adapter, version or alias answer from now on. Raise Refused if the server has none such."""
        status, answer = await self.connection.json("GET", f"/v1/models/{quote(name, safe='')}")
        if status >= 300:
            raise Refused(message_of(answer), status)
        self.model = answer["id"] if isinstance(answer, dict) and isinstance(answer.get("id"), str) else name

    async def ask(self, question: str, on_text: Callable[[str, bool], None]) -> Answer:
        """Ask, and return the whole answer. `on_text` gets each piece of it, and whether it is a thought.

        If the call is cancelled, what had been answered is kept. Raises Refused and HttpError.
        """
        asked = {"role": "user", "content": question}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*system, *self.messages, asked],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.options,
        }
        reader = _Reader(on_text)
        try:
            status = await self.connection.request("POST", "/v1/chat/completions", body, reader)
        except asyncio.CancelledError:
            self._keep(asked, reader.answer)
            raise
        if reader.error or status >= 300:
            raise Refused(reader.error or f"the server answered with {status}: {reader.refusal()}")
        if not reader.ended:
            raise HttpError("the server ended the answer before its end")
        self._keep(asked, reader.answer)
        return reader.answer

    def _keep(self, asked: dict[str, str], answer: Answer) -> None:
        if answer.text:
            self.messages += [asked, {"role": "assistant", "content": answer.text}]


class _Reader:
    """Reads the body of one streamed answer."""

    def __init__(self, on_text: Callable[[str, bool], None]) -> None:
        self.answer, self.error, self.ended = Answer(), "", False
        self._on_text, self._events, self._start = on_text, Events(self._read), b""

    def __call__(self, piece: bytes) -> None:
        self._start += piece[: MOST_ERROR_BYTES - len(self._start)]
        self._events(piece)

    def refusal(self) -> str:
        """Return the message of an answer that is an error instead of a stream."""
        try:
            return message_of(json.loads(self._start))
        except ValueError:
            return message_of(self._start.decode(errors="replace"))

    def _read(self, data: str) -> None:
        if data == "[DONE]":
            self.ended = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self.error = "the server sent an event that is no JSON object"
        elif event.get("error"):
            self.error = message_of(event)
        else:
            self.answer.tokens = int((event.get("usage") or {}).get("completion_tokens") or self.answer.tokens)
            for choice in event.get("choices") or ():
                self._take(choice.get("delta") or {}, choice.get("finish_reason"))

    def _take(self, delta: Mapping[str, Any], finish_reason: str | None) -> None:
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):
            self._on_text(thought, True)
        if text := delta.get("content"):
            self.answer.text += text
            self._on_text(text, False)
        self.answer.finish_reason = finish_reason or self.answer.finish_reason
