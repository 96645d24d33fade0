"""Converting Ollama's messages into the form that chat templates and `generation` expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.strict_json import check_nested, convert


class _Function(Struct):
    """The function of a call."""

    name: str
    arguments: dict[str, Any] = {}


class _Call(Struct):
    """A tool call of an earlier reply."""

    function: _Function
    id: str | None = None


class _Message(Struct):
    """A message of the conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def chat_form(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the conversation in the form of OpenAI's messages. Raises InvalidRequest naming the message."""
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    depth = 2 + limits.MAX_MESSAGE_DEPTH
    check_nested(list(messages), "messages", depth=depth, values=limits.MAX_MESSAGE_VALUES)
    return [_message(given, f"messages[{i}]") for i, given in enumerate(messages)]


def _message(given: Any, where: str) -> dict[str, Any]:
    """Return one message. `where` is its field in errors."""
    message = convert(given, _Message, where)
    if message.images:
        raise InvalidRequest(
            f"{where}.images: this model reads text only", param=f"{where}.images", code="unsupported_parameter"
        )
    made: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_name is not None:
        made["name"] = message.tool_name
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _call(call: _Call) -> dict[str, Any]:
    """Return a tool call."""
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
    return made if call.id is None else {"id": call.id} | made
