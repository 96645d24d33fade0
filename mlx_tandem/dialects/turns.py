"""The turns of a conversation in the form of OpenAI's chats, put together from pieces of other forms."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from mlx_tandem.generation.messages import ImageSource, image_field, image_url

Message = dict[str, Any]


class Turns:
    """The turns so far, in `messages`. `fields` has the request's name of each image's field, by OpenAI's name.

    A piece of a turn of a role in `joined` joins the turn before it: thoughts, text and calls of the assistant belong
    to one turn. Text of the other roles goes on a line of its own.
    """

    def __init__(self, joined: Collection[str]):
        self.fields: dict[str, str] = {}
        self._messages: list[Message] = []
        self._joined = frozenset(joined)
        self._growing: dict[tuple[int, str], tuple[Message, str, list[str]]] = {}
        """The texts of the last turn in pieces, each with the object and the key under which it belongs."""

    @property
    def messages(self) -> list[Message]:
        """The turns so far."""
        for place, key, pieces in self._growing.values():
            place[key] = "".join(pieces)
        self._growing.clear()
        return self._messages

    def text(self, role: str, text: str) -> None:
        """Add a piece of text."""
        self._add_text(self._turn(role), text)

    def content(self, role: str, pieces: Iterable[str | ImageSource]) -> None:
        """Add texts and images, which belong to one turn."""
        turn = self._turn(role)
        for piece in pieces:
            if isinstance(piece, str):
                self._add_text(turn, piece)
            else:
                self._add_image(turn, piece)

    def _add_text(self, turn: Message, text: str) -> None:
        """Add text to the last turn."""
        content = turn["content"]
        if isinstance(content, str):
            # An answer may come back in several pieces.
            self._grow(turn, "content", text, "" if turn["role"] == "assistant" else "\n")
        elif content[-1]["type"] == "text":
            self._grow(content[-1], "text", text, "\n")
        else:
            content.append({"type": "text", "text": text})

    def _grow(self, place: Message, key: str, text: str, between: str) -> None:
        """Add to a text of the last turn, which is put together when the turns are read, in one pass."""
        begun = [place[key]] if place.get(key) else []
        _, _, pieces = self._growing.setdefault((id(place), key), (place, key, begun))
        if pieces:
            pieces.append(between)
        if pieces or text:
            pieces.append(text)

    def _add_image(self, turn: Message, image: ImageSource) -> None:
        """Add an image to the last turn, whose content becomes a list."""
        count = len(self.messages) - 1
        if isinstance(turn["content"], str):
            turn["content"] = [{"type": "text", "text": turn["content"]}] if turn["content"] else []
        self.fields[image_field(count, len(turn["content"]))] = image.field
        turn["content"].append(image_url(image.url))

    def thought(self, text: str) -> None:
        """Add a piece of the assistant's reasoning. An empty one only says that there is a turn."""
        turn = self._turn("assistant")
        if text:
            self._grow(turn, "reasoning_content", text, "")

    def call(self, id: str, name: str, arguments: Any) -> None:
        """Add a tool call. The arguments are those that the client sent."""
        calls = self._turn("assistant").setdefault("tool_calls", [])
        calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call: str, text: str) -> None:
        """Add the result of the call with this id."""
        self.messages.append({"role": "tool", "tool_call_id": call, "content": text})

    def _turn(self, role: str) -> Message:
        """Return the last turn if this piece joins it, or else a new one."""
        if not self._messages or self._messages[-1]["role"] != role or role not in self._joined:
            self.messages.append({"role": role, "content": ""})
        return self._messages[-1]
