"""Responses, as whole bodies and as stream events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_tandem.dialects.arguments import arguments_in_reply
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.dialects.responses.tools import INPUT
from mlx_tandem.dialects.sse import COMMENT
from mlx_tandem.dialects.sse import event as sse
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answers, Spoken
from mlx_tandem.generation.events import (
    Finish,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from mlx_tandem.strict_json import dumps
from mlx_tandem.training.live.recorder import Outcome
from mlx_tandem.types import TokenLogprob

Item = dict[str, Any]

Keep = Callable[[str, bytes, Sequence[Item], bytes], None]
"""A function that keeps a response, given its id, its body, the items of its output, and the pieces of its stream.

The last is JSON: for each item a list of its Deltas. It is empty for a whole response.
"""

Delta = tuple[int, int]
"""The numbers of characters and of logprobs that one event of a stream has."""

_PREFIXES = {"message": "msg", "reasoning": "rs"}
"""The beginning of an item's id, by the type of the item."""

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""The type of the one part of an item's content, by the type of the item."""


@dataclass
class _Open:
    """The item of a stream that is not complete, and the pieces of its text or arguments so far."""

    item: Item
    pieces: list[str]
    logprobs: list[Item] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # of the logprobs of each piece, where they are wanted

    @property
    def deltas(self) -> list[Delta]:
        """The pieces that the item was streamed in."""
        counts = self.counts or [0] * len(self.pieces)
        return [(len(piece), count) for piece, count in zip(self.pieces, counts, strict=True)]

    @property
    def kind(self) -> str:
        """The type of the item."""
        return str(self.item["type"])


class ResponseRenderer(Renderer):
    """A writer of one response. A stream has one item of the output at a time, with its beginning, deltas and end."""

    keepalive = COMMENT

    def __init__(
        self,
        id: str,
        settings: dict[str, Any],
        keep: Keep | None,
        *,
        namespaces: Mapping[str, str] | None = None,
        customs: Collection[str] = (),
        logprobs: ChatLogprobs | None = None,
    ):
        """Begin the response with this id. `settings` are the members that repeat the request, and `keep` keeps it.

        `namespaces` has the namespace of each tool that is in one, and `customs` the names of custom tools. `logprobs`
        writes those of messages, if they are wanted.
        """
        self.id = id
        self._settings = settings
        self._keep = keep
        self._namespaces = namespaces or {}
        self._customs = frozenset(customs)
        self._logprobs = logprobs
        self.wants_details = logprobs is not None
        self._created = int(time.time())
        self._number = -1  # number of the last event
        self._output: list[Item] = []
        self._deltas: list[list[Delta]] = []  # of each item of a stream
        self._open: _Open | None = None
        self._before_text = b""
        self._waiting: list[Item] = []  # logprobs of tokens before the text of a message
        self._end: Finish | None = None

    # -- streams ------------------------------------------------------------------------------------------------

    def open(self) -> bytes:
        """Return the events before any output."""
        response = self._response("in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def text(self, event: TextDelta) -> bytes:
        """Return the events for a piece of text."""
        logprobs = self._waiting + self._taken(event.tokens, event.logprobs)
        is_begun = self._open is not None and self._open.kind == "message"
        self._waiting = [] if event.text or is_begun else logprobs
        if not event.text and not (is_begun and logprobs):
            return b""
        opening = self._begun("message")
        assert self._open is not None
        self._open.pieces.append(event.text)
        self._open.logprobs += logprobs
        if self._logprobs is not None:
            self._open.counts.append(len(logprobs))
        self._number += 1
        return opening + self._before_text % (self._number, dumps(event.text), dumps(logprobs))

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return the events for a piece of reasoning."""
        if not event.text:
            return b""
        self._waiting = []
        opening = self._begun("reasoning")
        assert self._open is not None
        self._open.pieces.append(event.text)
        return opening + self._event(
            "response.reasoning_text.delta", **self._place(), content_index=0, delta=event.text
        )

    def call(self, event: ToolCallStart) -> bytes:
        """Return the events for the beginning of a tool call."""
        self._waiting = []
        ending = self._done("completed")
        return ending + self._begin(self._call(len(self._output), event.id, event.name))

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Return the event for a piece of a tool call's arguments."""
        assert self._open is not None
        self._open.pieces.append(event.arguments)
        if self._open.kind == "custom_tool_call":  # Its input is known when the arguments are complete.
            return b""
        return self._event("response.function_call_arguments.delta", **self._place(), delta=event.arguments)

    def finish(self, event: Finish) -> bytes:
        """Return the end of the last item. The response's own end needs the usage."""
        self._end = event
        return self._done("incomplete" if event.reason == "length" else "completed")

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the event with the whole response, which is kept if the request asked for that."""
        assert self._end is not None
        status = _status(self._end)
        response = self._response(status, self._output, usage)
        if self._keep is not None:
            self._keep(self.id, dumps(response), self._output, dumps(self._deltas))
        return self._event(f"response.{status}", response=response)

    def error(self, error: TandemError) -> bytes:
        """Return the event with the failed response."""
        response = self._response("failed", self._output, None)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _begun(self, kind: str) -> bytes:
        """Return the events that an item of this kind begins with; nothing if one is open."""
        if self._open is not None and self._open.kind == kind:
            return b""
        ending = self._done("completed")
        index = len(self._output)
        make = _message if kind == "message" else _thought
        return ending + self._begin(make(self._item_id(_PREFIXES[kind], index), None, "in_progress"))

    def _begin(self, item: Item) -> bytes:
        """Return the events that an item begins with. Its content or its arguments follow."""
        self._open = _Open(item, [])
        events = self._event("response.output_item.added", output_index=len(self._output), item=item)
        if self._open.kind not in _PARTS:
            return events
        part = _part(self._open.kind, "")
        events += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        self._before_text = (
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":%%d,'
            b'"item_id":%b,"output_index":%d,"content_index":0,"delta":%%b,"logprobs":%%b}\n\n'
            % (dumps(item["id"]), len(self._output))
        )
        return events

    def _done(self, status: str) -> bytes:
        """Return the end of the item that is open; nothing if none is open."""
        if self._open is None:
            return b""
        kind, item, text = self._open.kind, self._open.item, "".join(self._open.pieces)
        place = self._place()
        if kind == "custom_tool_call":
            item = item | {"input": _custom_input(text), "status": status}
            events = self._event("response.custom_tool_call_input.delta", **place, delta=item["input"])
            events += self._event("response.custom_tool_call_input.done", **place, input=item["input"])
        elif kind == "function_call":
            item = item | {"arguments": text or "{}", "status": status}
            events = self._event("response.function_call_arguments.done", **place, arguments=item["arguments"])
        else:
            logprobs = self._open.logprobs
            part = _part(kind, text, logprobs)
            item = item | {"content": [part], "status": status}
            done: dict[str, Any] = {"text": text} | ({"logprobs": logprobs} if kind == "message" else {})
            events = self._event(f"response.{part['type']}.done", **place, content_index=0, **done)
            events += self._event("response.content_part.done", **place, content_index=0, part=part)
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._deltas.append(self._open.deltas)
        self._open = None
        return events

    def _taken(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[Item]:
        """Return OpenAI's objects for the logprobs of tokens, if they are wanted."""
        if self._logprobs is None:
            return []
        taken: list[Item] = self._logprobs.take(tokens, logprobs)["content"]
        return taken

    def _place(self) -> dict[str, Any]:
        """Return the members that say to which item an event belongs."""
        assert self._open is not None
        return {"item_id": self._open.item["id"], "output_index": len(self._output)}

    def _event(self, name: str, **members: Any) -> bytes:
        """Return the next event."""
        self._number += 1
        return sse(name.encode(), dumps({"type": name, "sequence_number": self._number} | members))

    # -- whole responses ----------------------------------------------------------------------------------------

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body, which is kept if the request asked for that."""
        (answer,) = answers.choices
        for index, part in enumerate(answer.parts):
            if isinstance(part, Spoken):
                kind, make = ("message", _message) if part.kind == "text" else ("reasoning", _thought)
                item = make(self._item_id(_PREFIXES[kind], index), part.text, "completed")
                if part.tokens:
                    tokens = [answer.tokens[i] for i in part.tokens]
                    item["content"][0]["logprobs"] = self._taken(tokens, [answer.logprobs[i] for i in part.tokens])
                self._output.append(item)
            else:
                call = self._call(index, part.id, part.name)
                text = "".join(part.pieces)
                said = {"input": _custom_input(text)} if "input" in call else {"arguments": text or "{}"}
                self._output.append(call | said | {"status": "completed"})
        status = _status(answer.end)
        if self._output:
            self._output[-1]["status"] = status
        body = dumps(self._response(status, self._output, usage))
        if self._keep is not None:
            self._keep(self.id, body, self._output, b"")
        return body

    def _call(self, index: int, call_id: str, name: str) -> Item:
        """Return the item for a call that has begun."""
        prefix, kind, said = ("fc", "function_call", "arguments")
        if name in self._customs:
            prefix, kind, said = ("ctc", "custom_tool_call", "input")
        item: Item = {"id": self._item_id(prefix, index), "type": kind, "call_id": call_id, "name": name}
        if name in self._namespaces:
            item["namespace"] = self._namespaces[name]
        return item | {said: "", "status": "in_progress"}

    def _item_id(self, prefix: str, index: int) -> str:
        """Return the id of the item with this index in the output."""
        return f"{prefix}_{self.id.partition('_')[2]}{index:04d}"

    def _response(self, status: str, output: list[Item], usage: Usage | None) -> dict[str, Any]:
        """Return the response object."""
        is_over = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if is_over else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if usage is None else _usage(usage),
        } | self._settings


def new_id() -> str:
    """Return the id of a new response."""
    return "resp_" + secrets.token_hex(16)


def _status(end: Finish) -> str:
    """Return the status of a response that has ended."""
    return "incomplete" if end.reason == "length" else "completed"


def _part(kind: str, text: str, logprobs: Sequence[Item] = ()) -> dict[str, Any]:
    """Return the one part of the content of an item of this kind."""
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": list(logprobs)} if kind == "message" else part


def _message(id: str, text: str | None, status: str) -> Item:
    """Return the item for a message. It has no content if `text` is None."""
    content = [] if text is None else [_part("message", text)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _thought(id: str, text: str | None, status: str) -> Item:
    """Return the item for a thought. It has no content if `text` is None."""
    content = [] if text is None else [_part("reasoning", text)]
    return {"id": id, "type": "reasoning", "summary": [], "status": status, "content": content}


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the arguments of the function that it is to the model.

    Arguments without an input are the input themselves: models that know the tool may call it as they learned to.
    """
    given = arguments_in_reply(arguments)
    found = msgspec.json.decode(given) if isinstance(given, msgspec.Raw) else {}
    text = found.get(INPUT)
    return text if isinstance(text, str) else arguments


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage object."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }
