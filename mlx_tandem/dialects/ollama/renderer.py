"""Ollama's replies, as one JSON object and as a stream of one object per line."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlx_tandem.dialects.arguments import arguments_in_reply
from mlx_tandem.dialects.ollama.errors import error_body
from mlx_tandem.dialects.openai.logprobs import ChatLogprobs
from mlx_tandem.dialects.plan import Renderer
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answers, ToolCall
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


def now() -> str:
    """Return the present time in the form of Ollama's replies."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaRenderer(Renderer):
    """The common base of the renderers of chats and completions.

    A call is written when its arguments are complete, since Ollama's clients get them as an object.
    """

    media = b"application/x-ndjson"

    def __init__(self, model: str, began: float, load_seconds: float, logprobs: ChatLogprobs | None = None):
        """Begin a reply of the model with this name. `began` is the time of the monotonic clock at its start.

        `logprobs` writes those of all tokens, if they are wanted.
        """
        self.id = "ollama-" + secrets.token_hex(12)
        self._model = model
        self._began = began
        self._load_seconds = load_seconds
        self._logprobs = logprobs
        self.wants_details = logprobs is not None
        self._waiting: list[dict[str, Any]] = []  # the logprobs of tokens since the last line
        self._call: ToolCall | None = None  # the call whose arguments are not complete
        self._reason = "stop"

    def said(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the members of an object for a piece of an answer, or for a whole one."""
        raise NotImplementedError

    # -- streams ------------------------------------------------------------------------------------------------

    def text(self, event: TextDelta) -> bytes:
        """Return the lines for a piece of text."""
        ending = self._end_call()
        self._take(event)
        return ending + (self._line(text=event.text) if event.text else b"")

    def reasoning(self, event: ReasoningDelta) -> bytes:
        """Return the lines for a piece of reasoning."""
        ending = self._end_call()
        self._take(event)
        return ending + (self._line(thinking=event.text) if event.text else b"")

    def call(self, event: ToolCallStart) -> bytes:
        """Keep a tool call until it is complete. Return the line of the one before."""
        ending = self._end_call()
        self._take(event)
        self._call = ToolCall(event.id, event.name)
        return ending

    def arguments(self, event: ToolCallArguments) -> bytes:
        """Keep a piece of a tool call's arguments."""
        assert self._call is not None
        self._call.pieces.append(event.arguments)
        self._take(event)
        return b""

    def finish(self, event: Finish) -> bytes:
        """Return the line of the last call. The last line of the stream needs the usage."""
        self._reason = event.reason
        ending = self._end_call()
        self._take(event)
        return ending

    def close(self, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the last line, which has the counts and durations."""
        said = self.said("", "", ()) | self._taken()
        return dumps(self._head() | said | self._end(self._reason, usage)) + b"\n"

    def error(self, error: TandemError) -> bytes:
        """Return the line with the error object."""
        return error_body(error) + b"\n"

    def _line(self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> bytes:
        """Return the line for a piece of the answer."""
        return dumps(self._head() | self.said(text, thinking, calls) | self._taken() | {"done": False}) + b"\n"

    def _take(self, event: TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finish) -> None:
        """Keep the logprobs of an event's tokens for the next line, if they are wanted."""
        if self._logprobs is not None:
            self._waiting += self._logprobs.take(event.tokens, event.logprobs)["content"]

    def _taken(self) -> dict[str, Any]:
        """Return the member of a line with the logprobs of the tokens since the last one, if there are any."""
        found, self._waiting = self._waiting, []
        return {"logprobs": found} if found else {}

    def _end_call(self) -> bytes:
        """Return the line of the call that is complete now; nothing if there is none."""
        if self._call is None:
            return b""
        call, self._call = self._call, None
        return self._line(calls=[call])

    # -- whole replies ------------------------------------------------------------------------------------------

    def whole(self, answers: Answers, usage: Usage, outcomes: Sequence[Outcome]) -> bytes:
        """Return the JSON body."""
        (answer,) = answers.choices
        said = self.said(answer.text, answer.reasoning, answer.calls)
        if self._logprobs is not None:
            said["logprobs"] = self._logprobs.take(answer.tokens, answer.logprobs)["content"]
        return dumps(self._head() | said | self._end(answer.reason, usage))

    def _head(self) -> dict[str, Any]:
        """Return the members that all objects of a reply begin with."""
        return {"model": self._model, "created_at": now()}

    def _end(self, reason: str, usage: Usage) -> dict[str, Any]:
        """Return the members at the end of a reply. Durations are in nanoseconds.

        The durations of prompt and answer are at least 1 ns, since clients compute tokens per second by them.
        """
        waited, generated = (max(seconds, 1e-9) for seconds in self.times)
        seconds = {
            "total_duration": time.monotonic() - self._began,
            "load_duration": self._load_seconds,
            "prompt_eval_duration": waited,
            "eval_duration": generated,
        }
        counts: dict[str, Any] = {"prompt_eval_count": usage.prompt, "eval_count": usage.completion}
        counts["prompt_eval_cached_count"] = usage.cached
        counts["eval_reasoning_count"] = usage.reasoning
        return {"done": True, "done_reason": reason} | counts | {k: int(v * 1e9) for k, v in seconds.items()}


class ChatRenderer(OllamaRenderer):
    """A writer of replies to chats."""

    def said(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the message, or a piece of it."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call_object(call) for call in calls]
        return {"message": message}


class GenerateRenderer(OllamaRenderer):
    """A writer of replies to completions, which offer no tools."""

    def said(self, text: str, thinking: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
        """Return the response, or a piece of it."""
        return {"response": text} | ({"thinking": thinking} if thinking else {})


def _call_object(call: ToolCall) -> dict[str, Any]:
    """Return Ollama's object for a tool call."""
    return {"id": call.id, "function": {"name": call.name, "arguments": arguments_in_reply("".join(call.pieces))}}
