"""Converting Ollama's messages into the form that chat templates and `generation` expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.arguments import arguments_sent_back
from mlx_tandem.dialects.turns import Turns
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import ImageSource
from mlx_tandem.strict_json import check_nested, convert


class _Function(Struct):
    """The function of a call."""

    name: str
    arguments: Any = None


class _Call(Struct):
    """A tool call of an earlier reply."""

    function: _Function
    id: str | None = None


class _Message(Struct):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


def chat_form(messages: Sequence[Any], *, sees: bool = False) -> Turns:
    """Return the conversation in the form of OpenAI's messages. Raises InvalidRequest naming the message.

    `sees` says whether the model sees images.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    depth = 2 + limits.MAX_MESSAGE_DEPTH
    check_nested(list(messages), "messages", depth=depth, values=limits.MAX_MESSAGE_VALUES)
    read = [convert(given, _Message, f"messages[{i}]") for i, given in enumerate(messages)]
    turns = Turns((), sees=sees, images=sum(len(message.images or ()) for message in read))
    for i, message in enumerate(read):
        _add(turns, message, f"messages[{i}].images")
    return turns.end()


def images(given: Sequence[str], where: str) -> list[ImageSource]:
    """Return images, each given as base64 without its format. `where` is their field."""
    return [ImageSource(f"data:image/*;base64,{data}", f"{where}[{i}]") for i, data in enumerate(given)]


def _add(turns: Turns, message: _Message, where: str) -> None:
    """Add one message. `where` is the field of its images."""
    if message.images and message.role not in ("user", "tool"):
        raise InvalidRequest(
            f"{where}: messages of the user and of tools only may hold images",
            param=where,
            code="unsupported_parameter",
        )
    pieces: list[str | ImageSource] = [message.content or "", *images(message.images or (), where)]
    if message.role == "tool":
        made = turns.result(message.tool_call_id, filter(None, pieces))
    else:
        turns.content(message.role, pieces)
        made = turns.messages[-1]
    if message.thinking:
        made["reasoning_content"] = message.thinking
    if message.tool_calls:
        made["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_name is not None:
        made["name"] = message.tool_name


def _call(call: _Call) -> dict[str, Any]:
    """Return a tool call."""
    arguments = arguments_sent_back(call.function.arguments)
    made: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id} | made
