"""Converting Anthropic's messages and tools into the form that chat templates and `generation` expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.dialects.anthropic.bodies import Tool, ToolChoice
from mlx_tandem.dialects.arguments import arguments_sent_back
from mlx_tandem.dialects.turns import Message, Turns
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


_Block = _Text | _Thinking | _Redacted | _Call | _Result | _Image

_BLOCKS: dict[str, dict[str, type[_Block]]] = {
    "system": {"text": _Text},
    "user": {"text": _Text, "tool_result": _Result, "image": _Image},
    "assistant": {"text": _Text, "thinking": _Thinking, "redacted_thinking": _Redacted, "tool_use": _Call},
}
"""The types of blocks that a message of each role may have."""

_MEDIA = frozenset({"document", "container_upload", "browser_state"})
"""Types of blocks whose content is no text."""


def chat_form(system: str | Sequence[Any] | None, messages: Sequence[Any]) -> Turns:
    """Return the conversation in the form of OpenAI's messages. Raises InvalidRequest naming the message or block.

    Consecutive turns of one role become one turn, and every tool result becomes a message of its own.
    """
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    for field, value in (("system", system), ("messages", messages)):
        given = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        check_nested(given, field, depth=2 + limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    turns = Turns(("system", "user", "assistant"))
    for text in [system] if isinstance(system, str) else _texts(system or (), "system"):
        turns.text("system", text)
    for i, entry in enumerate(messages):
        message = convert(entry, _Message, f"messages[{i}]")
        if message.role == "developer":  # as clients of other APIs call it
            message.role = "system"
        _add_message(turns, message, f"messages[{i}].content")
    return turns


def is_prefill(messages: Sequence[Message]) -> bool:
    """Return whether the answer continues the last message, which is then one of the assistant.

    Raises InvalidRequest for a last message that cannot be continued.
    """
    if not messages or messages[-1]["role"] != "assistant":
        return False
    if "tool_calls" in messages[-1]:
        raise InvalidRequest("messages ends with tool_use blocks that have no tool_result", param="messages")
    return True


def function_tools(tools: Sequence[Any] | None) -> list[Message]:
    """Return the tools in the form of OpenAI's. Raises InvalidRequest naming the tool."""
    made: list[Message] = []
    for i, given in enumerate(tools or ()):
        where = f"tools[{i}]"
        _refuse_keys(given, where)
        tool = convert(given, Tool, where)
        function: Message = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        made.append({"type": "function", "function": function})
    return made


def function_choice(choice: ToolChoice | None) -> tuple[Any, bool]:
    """Return OpenAI's `tool_choice` and `parallel_tool_calls` for Anthropic's choice. Raises InvalidRequest."""
    if choice is None:
        return None, True
    parallel = not choice.disable_parallel_tool_use
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type], parallel
    if choice.name is None:
        raise InvalidRequest("tool_choice.name is required", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}, parallel


def _refuse_keys(tool: Any, where: str) -> None:
    """Raise InvalidRequest for a tool of Anthropic's own, or one with a key that changes how it is offered."""
    if not isinstance(tool, dict):
        return
    if (kind := tool.get("type") or "custom") != "custom":
        raise InvalidRequest(
            f"{where}.type is {str(kind)[:64]!a}: tools of Anthropic's own are not available here",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    for key, neutral in (("defer_loading", False), ("input_examples", []), ("allowed_callers", ["direct"])):
        if tool.get(key, neutral) not in (None, neutral):
            raise InvalidRequest(
                f"{where}.{key} is not supported", param=f"{where}.{key}", code="unsupported_parameter"
            )


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


def _result(block: _Result, where: str) -> str:
    """Return the text of a tool's result. Chat templates have no place for `is_error`, so the text says it."""
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(_texts(content, where))
    return f"Error: {text}" if block.is_error else text


def _texts(blocks: Sequence[Any], where: str) -> list[str]:
    """Return the texts of blocks of which each has to be a text."""
    found = [_block(given, "system", f"{where}[{i}]") for i, given in enumerate(blocks)]
    return [block.text for block in found if isinstance(block, _Text)]


def _block(given: Any, role: str, where: str) -> _Block:
    """Return a block of a message of this role. Raises InvalidRequest naming the block."""
    kind = given.get("type") if isinstance(given, dict) else None
    known = _BLOCKS[role]
    if isinstance(kind, str) and kind not in known:
        why = "this model reads text only" if kind in _MEDIA else f"it can be {' or '.join(known)} there"
        raise InvalidRequest(
            f"{where}.type is {kind[:64]!a}: {why}", param=f"{where}.type", code="unsupported_parameter"
        )
    return convert(given, known[kind] if isinstance(kind, str) else _Typed, where)  # type: ignore[return-value]
