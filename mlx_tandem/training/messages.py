"""Messages of conversations as people write them in files and bodies, with tools, calls and their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import chat_messages
from mlx_tandem.generation.tools.offer import tools_of
from mlx_tandem.strict_json import dumps


class Turn(Struct, forbid_unknown_fields=True):
    """A message of a conversation. `content` may be absent only beside the assistant's `tool_calls`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def as_sent(self) -> dict[str, Any]:
        """Return the message in the form of OpenAI's requests."""
        names = ("name", "reasoning_content", "tool_call_id", "tool_calls")
        more = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"role": self.role, "content": self.content, **more}


class Message(Turn, forbid_unknown_fields=True):
    """A message of a conversation that is taught."""

    weight: Literal[0, 1] = 1  # of an assistant's message: whether it is taught


def for_template(messages: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates expect. Raises InvalidRequest naming the message and the key."""
    for i, message in enumerate(messages):
        if message.tool_calls is not None and message.role != "assistant":
            where = f"messages[{i}].tool_calls"
            raise InvalidRequest(f"{where}: only the assistant calls tools", param=where)
    return chat_messages([message.as_sent() for message in messages])


def tools_for_template(tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates print; none for None. Raises InvalidRequest naming the field."""
    offered = tools_of(tools, None, None)
    return [] if offered is None else offered.for_template


def as_text(messages: Sequence[Turn]) -> str:
    """Return what messages say, one below the other, for functions that score answers to them."""
    return "\n".join(_said(message) for message in for_template(messages))


def _said(message: dict[str, Any]) -> str:
    calls = [dumps(call.get("function")).decode() for call in message.get("tool_calls", ())]
    return "\n".join([part for part in (message["content"],) if part or not calls] + calls)
