"""Converting the items of responses into the form that chat templates and `generation` expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.responses.tools import INPUT
from mlx_tandem.dialects.turns import Piece, Turns, UnsupportedDocument
from mlx_tandem.errors import InvalidRequest, TooLarge
from mlx_tandem.generation.messages import ImageSource
from mlx_tandem.strict_json import check_nested, convert

Item = dict[str, Any]

ToolList = tuple[str, list[Any]]
"""A list of tools, behind its field."""


class _Part(Struct):
    """A part of the content of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class _Message(Struct):
    """A message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]


class _Call(Struct):
    """A call of a function in an earlier reply."""

    call_id: str
    name: str
    arguments: Any = None


class _Output(Struct):
    """The result of a call."""

    call_id: str
    output: str | list[_Part] | None = None


class _CustomCall(Struct):
    """A call of a custom tool in an earlier reply."""

    call_id: str
    name: str
    input: str


class _Tools(Struct):
    """Tools that are offered from here on."""

    tools: list[Any]


class _Skipped(Struct):
    """An item of a tool of OpenAI's own. It is left out."""


class _Reasoning(Struct):
    """The thoughts of an earlier reply. `encrypted_content` comes from other servers and is left out."""

    summary: list[_Part] | None = None
    content: list[_Part] | None = None


class _Reference(Struct):
    """A reference to an item of a response in the store."""

    id: str


_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of parts that are text."""

_Item = _Message | _Call | _CustomCall | _Output | _Reasoning | _Reference | _Tools | _Skipped

_ITEMS: dict[str, type[_Item]] = {
    "message": _Message,
    "function_call": _Call,
    "function_call_output": _Output,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Output,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
    "additional_tools": _Tools,
    **dict.fromkeys(
        """
        apply_patch_call apply_patch_call_output code_interpreter_call computer_call computer_call_output
        file_search_call image_generation_call local_shell_call local_shell_call_output mcp_approval_request
        mcp_approval_response mcp_call mcp_list_tools shell_call shell_call_output tool_search_call tool_search_output
        web_search_call
        """.split(),
        _Skipped,
    ),
}
"""The types of items. Those of OpenAI's own tools are left out: a conversation that began elsewhere may have them."""


def input_items(
    given: str | Sequence[Any] | None, find: Callable[[str], bytes | None], most_bytes: int = 1 << 20
) -> list[Item]:
    """Return the items of a request's input, of which a text is one. Raises InvalidRequest naming the item.

    `find` returns the JSON of the item of a stored response that a reference names. All items that references name have
    at most `most_bytes` bytes, each counted as often as it is named; TooLarge is raised for more.
    """
    if given is None:
        return []
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if len(given) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"input has at most {limits.MAX_MESSAGES} items", param="input")
    depth = 2 + limits.MAX_MESSAGE_DEPTH
    check_nested(list(given), "input", depth=depth, values=limits.MAX_MESSAGE_VALUES)
    items: list[Item] = []
    named: dict[int, str] = {}  # the id that is named at each place
    for i, item in enumerate(given):
        read = _item(item, f"input[{i}]")
        if isinstance(read, _Reference):
            named[i] = read.id
        items.append(item)
    found = _found(named, find, most_bytes)
    for i, id in named.items():
        items[i] = found[id]
    return items


def added_tools(items: Sequence[Item], *, before: int = 0) -> list[ToolList]:
    """Return the lists of tools among items that `chat_form` has read, each with its field."""
    lists = [(i, item) for i, item in enumerate(items) if item.get("type") == "additional_tools"]
    return [(f"input[{i - before}].tools", item["tools"]) for i, item in lists]


def _found(named: Mapping[int, str], find: Callable[[str], bytes | None], most_bytes: int) -> dict[str, Item]:
    """Return the stored items by their ids, each decoded once and only after the size of all of them is known.

    `named` has the ids by their places in the input. Raises InvalidRequest and TooLarge naming the place.
    """
    stored: dict[str, bytes] = {}
    size = 0
    for i, id in named.items():
        where = f"input[{i}].id"
        if id not in stored:
            item = find(id)
            if item is None:
                raise InvalidRequest(f"{where}: no stored response has the item {id[:64]!a}", param=where)
            stored[id] = item
        size += len(stored[id])
        if size > most_bytes:
            raise TooLarge(f"{where}: the items that input refers to have over {most_bytes} bytes", param=where)
    return {id: msgspec.json.decode(item) for id, item in stored.items()}


def chat_form(instructions: str | None, items: Sequence[Item], *, before: int = 0, sees: bool = False) -> Turns:
    """Return the conversation in the form of OpenAI's chats. Raises InvalidRequest naming the item.

    The first `before` items are those of earlier responses, which errors do not count. `sees` says whether the model
    sees images.
    """
    read = [_item(given, f"input[{i - before}]") for i, given in enumerate(items)]
    turns = Turns(("system", "assistant"), sees=sees, images=sum(map(_images, read)))
    if instructions:
        turns.text("system", instructions)
    for i, item in enumerate(read):
        where = f"input[{i - before}]"
        match item:
            case _Message(role, content):
                role = "system" if role == "developer" else role
                if role == "user" and not isinstance(content, str) and any(map(_is_image, content)):
                    turns.content(role, [_piece(part, f"{where}.content[{j}]") for j, part in enumerate(content)])
                else:
                    turns.text(role, _text(content, f"{where}.content"))
            case _Call(call_id, name, arguments):
                turns.call(call_id, name, arguments)
            case _Output(call_id, output):
                turns.result(call_id, _result(output or "", f"{where}.output"))
            case _CustomCall(call_id, name, text):
                turns.call(call_id, name, {INPUT: text})
            case _Reasoning(summary, content):
                turns.thought(_text(content or summary or [], f"{where}.content"))
            case _Skipped():
                turns.skip("assistant", f"{where} {items[i]['type']}")
    return turns.end()


def _is_image(part: _Part) -> bool:
    """Return whether a part is an image."""
    return part.type == "input_image"


def _images(item: _Item) -> int:
    """Return the number of images in an item."""
    match item:
        case _Message(_, content) | _Output(_, content) if not isinstance(content, str):
            return sum(map(_is_image, content or ()))
        case _:
            return 0


def _result(output: str | Sequence[_Part], where: str) -> Iterator[Piece]:
    """Yield the pieces of a call's result, in which texts that follow each other are one."""
    if isinstance(output, str):
        yield output
        return
    text = ""
    for i, part in enumerate(output):
        field = f"{where}[{i}]"
        piece = UnsupportedDocument(field) if part.type == "input_file" else _piece(part, field)
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
        yield piece
        text = ""
    if text:
        yield text


def _piece(part: _Part, where: str) -> str | ImageSource:
    """Return a text or an image. Raises InvalidRequest for another part, and for an image by a file's id."""
    if not _is_image(part):
        return _part_text(part, where)
    field = f"{where}.image_url"
    if part.image_url is None:
        raise InvalidRequest(f"{field} is required: this server keeps no files", param=field)
    return ImageSource(part.image_url, field)


def _item(given: Any, where: str) -> _Item:
    """Return an item as a struct. Raises InvalidRequest naming the item."""
    kind = given.get("type") or "message" if isinstance(given, dict) else "message"
    if kind == "message" and isinstance(given, dict) and "role" not in given and set(given) == {"id"}:
        kind = "item_reference"  # Its type may be absent.
    if not isinstance(kind, str) or kind not in _ITEMS:
        raise InvalidRequest(
            f"{where}.type is {str(kind)[:64]!a}, which this server has no use for",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    return convert(given, _ITEMS[kind], where)


def _text(content: str | Sequence[_Part], where: str) -> str:
    """Return the text of an item's content. Raises InvalidRequest for a part that is no text."""
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: _Part, where: str) -> str:
    """Return the text of a part. Raises InvalidRequest for one that is no text."""
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXTS, "refusal") or text is None:
        name = f"{where}.type"
        raise InvalidRequest(
            f"{name} is {part.type[:64]!a}: only text can be used here", param=name, code="unsupported_parameter"
        )
    return text
