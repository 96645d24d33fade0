"""Anthropic's replies, as whole messages and as stream events."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any, Literal

from mlx_tandem.dialects.anthropic.errors import error_body
from mlx_tandem.dialects.arguments import arguments_in_reply
from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.dialects.sse import event as sse
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answers, Spoken, ToolCall
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

AtLimit = Literal["max_tokens", "model_context_window_exceeded"]
"""The reason for the end of an answer that was as long as it may be."""

PING = sse(b"ping", b'{"type":"ping"}')

_Kind = Literal["text", "thinking", "tool_use"]


class MessageRenderer(Renderer):
    """A writer of one message. A stream has a block of content at a time, with its start, deltas and stop.

    Thoughts get a digest of their text as their signature, which clients send back and nobody checks.
    """

    wants_details = False
    keepalive = PING

    def __init__(self, model: str, prompt_tokens: int, at_limit: AtLimit, *, shows_thoughts: bool = True):
        """Begin a message of the model with this name. Without `shows_thoughts`, thoughts have only a signature."""
        self.id = "msg_" + secrets.token_hex(12)
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._at_limit = at_limit
        self._shows_thoughts = shows_thoughts
        self._index = -1
        self._open: _Kind | None = None  # the kind of the block that is open
        self._before_text = b""
        self._signature = hashlib.sha256()
        self._called = False
        self._end: Finish | None = None

    # -- streams ------------------------------------------------------------------------------------------------

    def open(self) -> bytes:
        """Return the first event of the stream, which has the number of the prompt's tokens.

        How many of them are cached is not known before the prompt is read. The usage at the end says it.
        """
        message = self._message([], None, None) | {"usage": _usage(Usage(self._prompt_tokens))}
        return sse(b"message_start", dumps({"type": "message_start", "message": message})) + PING

    def text(self, event: TextDelta) -> bytes:
        """Return the events for a piece of text."""
        if not event.text:
            return b""
        opening = b"" if self._open == "text" else self._begin("text", {"text": ""})
        return opening + self._before_text + dumps(event.text) + b"}}\n\n"

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return the events for a piece of reasoning."""
        if not event.text:
            return b""
        opening = b""
        if self._open != "thinking":
            opening = self._begin("thinking", {"thinking": "", "signature": ""})
            self._signature = hashlib.sha256()
        self._signature.update(event.text.encode())
        if not self._shows_thoughts:
            return opening
        return opening + self._delta({"type": "thinking_delta", "thinking": event.text})

    def call(self, event: ToolCallStart) -> bytes:
        """Return the events for the beginning of a tool call."""
        self._called = True
        return self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Return the event for a piece of a tool call's arguments."""
        return self._delta({"type": "input_json_delta", "partial_json": event.arguments})

    def finish(self, event: Finish) -> bytes:
        """Return the end of the last block. The message's own end needs the usage."""
        self._end = event
        return self._stop()

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the end of the message."""
        assert self._end is not None
        reason, stop = self._reason(self._end, called=self._called)
        delta = {"stop_reason": reason, "stop_sequence": stop}
        data = dumps({"type": "message_delta", "delta": delta, "usage": _usage(usage)})
        return sse(b"message_delta", data) + sse(b"message_stop", b'{"type":"message_stop"}')

    def error(self, error: TandemError) -> bytes:
        """Return the event with the error object."""
        return sse(b"error", error_body(error))

    def _begin(self, kind: _Kind, members: dict[str, Any]) -> bytes:
        """Return the end of the block that is open and the start of another one."""
        ending = self._stop()
        self._index += 1
        self._open = kind
        self._before_text = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":' % self._index
        )
        block = {"type": kind} | members
        data = {"type": "content_block_start", "index": self._index, "content_block": block}
        return ending + sse(b"content_block_start", dumps(data))

    def _delta(self, delta: dict[str, Any]) -> bytes:
        """Return the event for a piece of the block that is open."""
        data = {"type": "content_block_delta", "index": self._index, "delta": delta}
        return sse(b"content_block_delta", dumps(data))

    def _stop(self) -> bytes:
        """Return the end of the block that is open, which a thought's signature precedes; nothing if none is open."""
        if self._open is None:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": _written(self._signature.digest())})
        self._open = None
        data = b'{"type":"content_block_stop","index":%d}' % self._index
        return signature + sse(b"content_block_stop", data)

    # -- whole messages -----------------------------------------------------------------------------------------

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        (answer,) = answers.choices
        content = [self._block(part) for part in answer.parts]
        reason, stop = self._reason(answer.end, called=bool(answer.calls))
        return dumps(self._message(content, reason, stop) | {"usage": _usage(usage)})

    def _block(self, part: Spoken | ToolCall) -> dict[str, Any]:
        """Return a block of a message's content."""
        if isinstance(part, ToolCall):
            return {
                "type": "tool_use",
                "id": part.id,
                "name": part.name,
                "input": arguments_in_reply("".join(part.pieces)),
            }
        if part.kind == "text":
            return {"type": "text", "text": part.text}
        signature = _written(hashlib.sha256(part.text.encode()).digest())
        return {"type": "thinking", "thinking": part.text if self._shows_thoughts else "", "signature": signature}

    def _message(self, content: list[dict[str, Any]], reason: str | None, stop: str | None) -> dict[str, Any]:
        """Return the message without its usage."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
        }

    def _reason(self, end: Finish, *, called: bool) -> tuple[str, str | None]:
        """Return the reason for the end of the message, and the stop sequence that ended it."""
        if end.reason == "length":
            return self._at_limit, None
        if end.stop is not None:
            return "stop_sequence", end.stop
        return "tool_use" if called else "end_turn", None


def _usage(usage: Usage) -> dict[str, Any]:
    """Return Anthropic's usage object. Its count of a prompt's tokens leaves out those that were cached."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
        "output_tokens_details": {"thinking_tokens": usage.reasoning},
    }


def _written(digest: bytes) -> str:
    """Return a digest as text."""
    return base64.b64encode(digest).decode()
