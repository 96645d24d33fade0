"""The messages of a conversation: what clients send, and send back of earlier replies, as chat templates expect it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.decode import check_nested, convert
from mlx_tandem.errors import InvalidRequest

NO_EFFECT = frozenset({"annotations", "audio", "refusal"})
"""Keys of replies that say nothing to a model that reads text."""


class TextPart(Struct):
    type: Literal["text"]
    text: str


class ChatMessage(Struct):
    """The keys of a message that are looked at here. All other ones reach the template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


def chat_messages(messages: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the conversation as templates expect it. Raises InvalidRequest naming the message and the key."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    given = list(messages)
    # Their list and themselves are two levels.
    check_nested(given, "messages", depth=2 + limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    message = convert(given, ChatMessage, where)
    content = message.content
    if content is None:
        # What the assistant said may be calls of tools, reasoning or a refusal alone.
        if message.role != "assistant":
            raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
        content = ""
    entry = {key: value for key, value in given.items() if value is not None and key not in NO_EFFECT}
    # Templates know "system" only; "developer" is its newer name.
    entry["role"] = "system" if message.role == "developer" else message.role
    entry["content"] = content if isinstance(content, str) else "".join(part.text for part in content)
    entry.pop("tool_calls", None)
    if message.tool_calls:
        entry["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return entry


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are an object, as templates print them; OpenAI's replies have them as JSON text.
    What is no JSON object stays the text that it is."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
        check_nested(arguments, "", depth=limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    except (ValueError, RecursionError, InvalidRequest):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
