"""Converting Anthropic's messages into the form that chat templates and `generation` expect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.arguments import arguments_sent_back
from mlx_tandem.dialects.turns import Message, Piece, Turns, UnsupportedDocument
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.messages import ImageSource
from mlx_tandem.strict_json import check_nested, convert


class _Message(Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Any]


class _Typed(Struct):
    """The key that every block has."""

    type: str


class _Text(Struct):
    """A block of text."""

    text: str


class _Thinking(Struct):
    """A thought of an earlier reply. Its signature means nothing here."""

    thinking: str


class _Redacted(Struct):
    """A thought that only another server can read. It is left out."""


class _Call(Struct):
    """A tool call of an earlier reply."""

    id: str
    name: str
    input: Any = None


class _Result(Struct):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[Any] | None = None
    is_error: bool | None = None


class _Source(Struct):
    """The place of an image: its data, or its URL."""

    type: Literal["base64", "url"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"] | None = None
    data: str | None = None
    url: str | None = None


class _Image(Struct):
    """An image."""

    source: _Source


class _ToolReference(Struct):
    """The name of a tool that a search has found."""

    tool_name: str


class _SearchResult(Struct):
    """A text that a search has found."""

    title: str
    source: str
    content: list[Any]


class _DocumentSource(Struct):
    """The content of a document. Only that of the type `text` can be read here."""

    type: str
    data: str | None = None


class _Document(Struct):
    """A document."""

    source: _DocumentSource
    title: str | None = None
    context: str | None = None


class _Skipped(Struct):
    """A block of a tool that Anthropic runs. It is left out."""


_Block = (
    _Text | _Thinking | _Redacted | _Call | _Result | _Image | _ToolReference | _SearchResult | _Document | _Skipped
)

_BLOCKS: dict[str, dict[str, type[_Block]]] = {
    "system": {"text": _Text},
    "user": {"text": _Text, "tool_result": _Result, "image": _Image},
    "assistant": {"text": _Text, "thinking": _Thinking, "redacted_thinking": _Redacted, "tool_use": _Call},
    "result": {
        "text": _Text,
        "image": _Image,
        "tool_reference": _ToolReference,
        "search_result": _SearchResult,
        "document": _Document,
    },
}
"""The types of blocks that a message of each role and the result of a tool may have."""

_SKIPPED = re.compile(r"(?:server|mcp)_tool_use|[a-z_]{1,50}_tool_result|mcp_tool_listing")
"""Types of blocks of tools that Anthropic runs, which a conversation that began elsewhere may have."""

_BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n*")
"""A line that Claude Code begins its instructions with. It differs between requests, so the cache would find nothing
behind it, and it tells the model nothing.
"""

_MEDIA = frozenset({"document", "container_upload", "browser_state"})
"""Types of blocks whose content is no text."""


def chat_form(system: str | Sequence[Any] | None, messages: Sequence[Any], *, sees: bool = False) -> Turns:
    """Return the conversation in the form of OpenAI's messages. Raises InvalidRequest naming the message or block.

    Consecutive turns of one role become one turn, and every tool result becomes a message of its own. `sees` says
    whether the model sees images.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    for field, value in (("system", system), ("messages", messages)):
        given = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        check_nested(given, field, depth=2 + limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    read = [convert(entry, _Message, f"messages[{i}]") for i, entry in enumerate(messages)]
    turns = Turns(("system", "user", "assistant"), sees=sees, images=sum(_images(message.content) for message in read))
    for text in [system] if isinstance(system, str) else _texts(system or (), "system"):
        billing = _BILLING.match(text)
        if billing is None or billing.end() < len(text):
            turns.text("system", text[billing.end() if billing else 0 :])
    for i, message in enumerate(read):
        if message.role == "developer":  # as clients of other APIs call it
            message.role = "system"
        _add_message(turns, message, f"messages[{i}].content")
    return turns.end()


def is_prefill(messages: Sequence[Message]) -> bool:
    """Return whether the answer continues the last message, which is then one of the assistant.

    Raises InvalidRequest for a last message that cannot be continued.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if "tool_calls" in messages[-1]:
        raise InvalidRequest("messages ends with tool_use blocks that have no tool_result", param="messages")
    return True


def _images(content: str | list[Any] | None) -> int:
    """Return the number of images in the content of a message or a result, which has not been checked."""
    if not isinstance(content, list):
        return 0
    blocks = [block for block in content if isinstance(block, dict)]
    inside = (_images(block.get("content")) for block in blocks if block.get("type") == "tool_result")
    return len([block for block in blocks if block.get("type") == "image"]) + sum(inside)


def _add_message(turns: Turns, message: _Message, where: str) -> None:
    """Add the pieces of a message. `where` is the field of its content."""
    if isinstance(message.content, str):
        turns.text(message.role, message.content)
        return
    if not message.content:
        turns.text(message.role, "")
    for i, given in enumerate(message.content):
        block = _block(given, message.role, f"{where}[{i}]")
        match block:
            case _Text():
                turns.text(message.role, block.text)
            case _Thinking():
                turns.thought(block.thinking)
            case _Call():
                turns.call(block.id, block.name, arguments_sent_back(block.input))
            case _Image():
                field = f"{where}[{i}].source"
                turns.content(message.role, [ImageSource(_url(block.source, field), field)])
            case _Result():
                turns.result(block.tool_use_id, _result(block, f"{where}[{i}].content"))
            case _Redacted():
                turns.thought("")
            case _Skipped():
                turns.skip(message.role, f"{where}[{i}] {given['type']}")


def _url(source: _Source, where: str) -> str:
    """Return the URL of an image. Raises InvalidRequest naming the key that is missing."""
    if source.type == "url":
        if source.url is None:
            raise InvalidRequest(f"{where}.url is required", param=f"{where}.url", code="missing_required_parameter")
        return source.url
    for name in ("data", "media_type"):
        if getattr(source, name) is None:
            field = f"{where}.{name}"
            raise InvalidRequest(f"{field} is required", param=field, code="missing_required_parameter")
    return f"data:{source.media_type};base64,{source.data}"


def _result(block: _Result, where: str) -> Iterator[Piece]:
    """Yield the pieces of a tool's result. Chat templates have no place for `is_error`, so the text says it."""
    content = block.content or ""
    pieces = (
        [content] if isinstance(content, str) else [_piece(given, f"{where}[{i}]") for i, given in enumerate(content)]
    )
    first = pieces[0] if pieces else ""
    if not block.is_error:
        yield from pieces
    elif isinstance(first, str):
        yield from (f"Error: {first}", *pieces[1:])
    else:
        yield from ("Error:", *pieces)


def _piece(given: Any, where: str) -> Piece:
    """Return a piece of a tool's result. Raises InvalidRequest naming the block."""
    match _block(given, "result", where):
        case _Text(text):
            return text
        case _Image(source):
            return ImageSource(_url(source, f"{where}.source"), f"{where}.source")
        case _ToolReference(name):
            return f"The tool {name} can be called now."
        case _SearchResult(title, source, content):
            return "\n".join([title, source, *_texts(content, f"{where}.content")])
        case _Document(source, title, context):
            if source.type != "text" or source.data is None:
                return UnsupportedDocument(where)
            return "\n".join(text for text in (title, context, source.data) if text is not None)
        case other:
            raise AssertionError(other)


def _texts(blocks: Sequence[Any], where: str) -> list[str]:
    """Return the texts of blocks of which each has to be a text."""
    found = [_block(given, "system", f"{where}[{i}]") for i, given in enumerate(blocks)]
    return [block.text for block in found if isinstance(block, _Text)]


def _block(given: Any, role: str, where: str) -> _Block:
    """Return a block of a message of this role. Raises InvalidRequest naming the block."""
    kind = given.get("type") if isinstance(given, dict) else None
    known = _BLOCKS[role]
    if isinstance(kind, str) and kind not in known and role != "result" and _SKIPPED.fullmatch(kind):
        return _Skipped()
    if isinstance(kind, str) and kind not in known:
        why = "this model reads text only" if kind in _MEDIA else f"it can be {' or '.join(known)} there"
        raise InvalidRequest(
            f"{where}.type is {kind[:64]!a}: {why}", param=f"{where}.type", code="unsupported_parameter"
        )
    return convert(given, known[kind] if isinstance(kind, str) else _Typed, where)  # type: ignore[return-value]
