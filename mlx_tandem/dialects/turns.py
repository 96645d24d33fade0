"""The turns of a conversation in the form of OpenAI's chats, put together from pieces of other forms."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from mlx_tandem import limits
from mlx_tandem.generation.messages import ImageSource, image_field, image_url

Message = dict[str, Any]

IMAGE_FOLLOWS = "[An image, which the next message shows.]"
"""The note in a tool result in place of an image that becomes a turn of the user after the results."""

IMAGE_UNSUPPORTED = "[An image, which this model cannot see.]"
"""The note in place of an image if the model reads no images."""

IMAGE_OVER_LIMIT = f"[An image, which is left out: a request has at most {limits.MAX_IMAGES}.]"
"""The note in place of an image that the request has no room for."""

DOCUMENT_UNSUPPORTED = "[A document, which this server cannot read.]"
"""The note in place of a document that is not plain text."""


class UnsupportedDocument(NamedTuple):
    """A document in a tool result that is not plain text, by its field in the request."""

    field: str


Piece = str | ImageSource | UnsupportedDocument
"""One part of a tool result: text, an image, or a document that cannot be read."""


class Turns:
    """The turns so far, in `messages`.

    `fields` maps the path of each image in these messages to its path in the client's request, for error messages.
    `skipped` lists what was left out: the field of each piece, and what it was.

    A piece joins the turn before it if both have the same role and this role is in `joined`: thoughts, text and calls
    of the assistant belong to one turn. In turns of other roles each text begins on a new line.

    If the model reads images, those in tool results become a turn of the user after these results. If it does not, a
    note replaces each of them. `end` has to be called after the last piece.
    """

    def __init__(self, joined: Collection[str], *, sees: bool = False, images: int = 0):
        """Begin a conversation. `sees` says whether the model sees images, of which the request has `images`."""
        self.fields: dict[str, str] = {}
        self.skipped: list[str] = []
        self._messages: list[Message] = []
        self._joined = frozenset(joined)
        self._growing: dict[tuple[int, str], tuple[Message, str, list[str]]] = {}
        """The texts of the last turn in pieces, each with the object and the key under which it belongs."""
        self._sees = sees
        self._surplus = images - limits.MAX_IMAGES
        self._waiting: list[ImageSource] = []  # images of results, until these results end

    @property
    def messages(self) -> list[Message]:
        """The turns so far."""
        for place, key, pieces in self._growing.values():
            place[key] = "".join(pieces)
        self._growing.clear()
        return self._messages

    def end(self) -> Turns:
        """Return these turns, which are complete."""
        self._flush_images()
        return self

    def skip(self, role: str, field: str) -> None:
        """Record a skipped piece. The turn of this role is still created, so that the order of turns stays."""
        self._turn(role)
        self.skipped.append(field)

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

    def result(self, call: str | None, pieces: Iterable[Piece]) -> Message:
        """Add and return the result of the call with this id, if it has one. Each of its pieces becomes a line."""
        text = "\n".join(piece if isinstance(piece, str) else self._in_result(piece) for piece in pieces)
        made = {"role": "tool", "content": text} | ({} if call is None else {"tool_call_id": call})
        self.messages.append(made)
        return made

    def _in_result(self, piece: ImageSource | UnsupportedDocument) -> str:
        """Return what a tool's result says in the place of an image or a document. Images follow the results.

        Of more images than a request may have, the oldest ones are left out: a session that goes on has ever more.
        """
        if isinstance(piece, UnsupportedDocument):
            self.skipped.append(f"{piece.field} document")
            return DOCUMENT_UNSUPPORTED
        if self._sees and self._surplus <= 0:
            self._waiting.append(piece)
            return IMAGE_FOLLOWS
        self._surplus -= 1
        self.skipped.append(f"{piece.field} image")
        return IMAGE_OVER_LIMIT if self._sees else IMAGE_UNSUPPORTED

    def _flush_images(self) -> None:
        """Add the images of the results so far."""
        if self._waiting:
            images, self._waiting = self._waiting, []
            self.content("user", images)

    def _turn(self, role: str) -> Message:
        """Return the last turn if this piece joins it, or else a new one."""
        self._flush_images()
        if not self._messages or self._messages[-1]["role"] != role or role not in self._joined:
            self.messages.append({"role": role, "content": ""})
        return self._messages[-1]
