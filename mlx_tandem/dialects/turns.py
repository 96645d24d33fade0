"""The turns of a conversation in the form of OpenAI's chats, put together from pieces of other forms."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

Message = dict[str, Any]


class Turns:
    """The turns so far, in `messages`.

    A piece of a turn of the assistant joins the turn before it, because thoughts, text and calls belong to one turn. So
    does text of the other roles in `joined`, on a line of its own.
    """

    def __init__(self, joined: Collection[str]):
        self.messages: list[Message] = []
        self._joined = {*joined, "assistant"}

    def text(self, role: str, text: str) -> None:
        """Add a piece of text."""
        turn = self._turn(role)
        between = "\n" if turn["content"] and role != "assistant" else ""  # An answer may come back in several pieces.
        turn["content"] += between + text

    def thought(self, text: str) -> None:
        """Add a piece of the assistant's reasoning. An empty one only says that there is a turn."""
        turn = self._turn("assistant")
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, id: str, name: str, arguments: Any) -> None:
        """Add a tool call. The arguments are an object or its JSON."""
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call: str, text: str) -> None:
        """Add the result of the call with this id."""
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})

    def _turn(self, role: str) -> Message:
        """Return the last turn if this piece joins it, or else a new one."""
        if not self.messages or self.messages[-1]["role"] != role or role not in self._joined:
            self.messages.append({"role": role, "content": ""})
        return self.messages[-1]
