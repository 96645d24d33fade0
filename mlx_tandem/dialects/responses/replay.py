"""Streaming a response of the store again: the same events as when it was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec
from msgspec import Raw

from mlx_tandem.dialects.response_store import Stored
from mlx_tandem.dialects.responses.renderer import Delta, Item, ResponseRenderer
from mlx_tandem.dialects.responses.tools import INPUT
from mlx_tandem.generation.events import Finish, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from mlx_tandem.strict_json import dumps

PIECE = 65_536
"""Fewest bytes that are sent together."""


def replayed(stored: Stored, starting_after: int | None) -> Iterator[bytes]:
    """Yield the events of a response in larger pieces, beginning behind the event with the number `starting_after`.

    The answer comes in the pieces in which it was streamed, and each item in one if it was not.
    """
    waiting = bytearray()
    skipped = 0 if starting_after is None else starting_after + 1
    for events in _events(stored):
        for event in events.split(b"\n\n")[:-1]:
            if skipped:
                skipped -= 1
                continue
            waiting += event + b"\n\n"
        if len(waiting) >= PIECE:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _events(stored: Stored) -> Iterator[bytes]:
    """Yield the events of a response, from none to a few at once."""
    body = _body(stored.body)
    deltas = msgspec.json.decode(stored.deltas or b"[]", type=list[list[Delta]])
    renderer = _Replayer(body)
    yield renderer.open()
    for index, item in enumerate(body["output"]):
        yield from renderer.item(item, deltas[index] if deltas else None)
    yield renderer.finish(Finish(0, "length" if body["status"] == "incomplete" else "stop"))
    yield renderer.ending()


def _body(stored: bytes) -> dict[str, Any]:
    """Return the body of a response, in which the logprobs of a token are JSON: decoded they are six times as large."""
    members = msgspec.json.decode(stored, type=dict[str, Raw])
    return {name: _output(value) if name == "output" else msgspec.json.decode(value) for name, value in members.items()}


def _output(stored: Raw) -> list[Item]:
    """Return the items of a response."""
    items = msgspec.json.decode(stored, type=list[dict[str, Raw]])
    return [{k: _content(v) if k == "content" else msgspec.json.decode(v) for k, v in item.items()} for item in items]


def _content(stored: Raw) -> list[Item]:
    """Return the parts of an item."""
    parts = msgspec.json.decode(stored, type=list[dict[str, Raw]])
    kinds: dict[str, Any] = {"logprobs": list[Raw]}
    return [{k: msgspec.json.decode(v, type=kinds.get(k, Any)) for k, v in part.items()} for part in parts]


class _Replayer(ResponseRenderer):
    """A writer of the events of a response that is known already."""

    def __init__(self, body: dict[str, Any]):
        output = body["output"]
        namespaces = {item["name"]: item["namespace"] for item in output if "namespace" in item}
        customs = [item["name"] for item in output if item["type"] == "custom_tool_call"]
        super().__init__(body["id"], {}, None, namespaces=namespaces, customs=customs)
        own = self._response("", [], None)
        self._settings = {name: value for name, value in body.items() if name not in own}
        self._given: list[Item] = []  # the logprobs of the next piece of text
        self._created = body["created_at"]
        self._body = body

    def item(self, item: Item, deltas: Sequence[Delta] | None) -> Iterator[bytes]:
        """Yield the events of an item but those of its end."""
        match item["type"]:
            case "message":
                part = item["content"][0]
                for text, self._given in _cut(part["text"], part["logprobs"], deltas):
                    yield self.text(TextDelta(0, text))
            case "reasoning":
                for text, _ in _cut(item["content"][0]["text"], [], deltas):
                    yield self.reasoning(ReasoningDelta(0, text))
            case "custom_tool_call":
                yield self.call(ToolCallStart(0, 0, item["call_id"], item["name"]))
                yield self.arguments(ToolCallArguments(0, 0, dumps({INPUT: item["input"]}).decode()))
            case _:
                yield self.call(ToolCallStart(0, 0, item["call_id"], item["name"]))
                for text, _ in _cut(item["arguments"], [], deltas):
                    yield self.arguments(ToolCallArguments(0, 0, text))

    def ending(self) -> bytes:
        """Return the last event."""
        return self._event(f"response.{self._body['status']}", response=self._body)

    def _taken(self, tokens: Sequence[int], logprobs: Sequence[Any]) -> list[Item]:
        return self._given


def _cut(text: str, logprobs: list[Item], deltas: Sequence[Delta] | None) -> Iterator[tuple[str, list[Item]]]:
    """Yield a text and its logprobs in the pieces in which they were streamed."""
    if deltas is None:
        yield text, logprobs
        return
    texts = pairwise(accumulate((characters for characters, _ in deltas), initial=0))
    counts = pairwise(accumulate((count for _, count in deltas), initial=0))
    for (a, b), (c, d) in zip(texts, counts, strict=True):
        yield text[a:b], logprobs[c:d]
