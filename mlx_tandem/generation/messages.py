"""The messages of a conversation, converted from the form that clients send to the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.tool_history import arguments_object, in_call_order, name_results
from mlx_tandem.generation.video_parts import FramesPart, VideoSource, VideoUrlPart, video_source
from mlx_tandem.strict_json import check_nested, convert

NO_EFFECT = frozenset({"annotations", "audio", "refusal"})
"""Keys of earlier replies that clients send back and that mean nothing to a text model."""


class TextPart(Struct, tag="text", tag_field="type"):
    """One text part of a message whose content is a list."""

    text: str


class RefusalPart(Struct, tag="refusal", tag_field="type"):
    """One part of an earlier answer in which the model refused to answer."""

    refusal: str


class ImageUrl(Struct):
    """The address of an image. The model's processor decides on the resolution, whatever `detail` says."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Struct, tag="image_url", tag_field="type"):
    """One image of a message of the user."""

    image_url: ImageUrl


ContentPart = TextPart | RefusalPart | ImagePart | VideoUrlPart | FramesPart
"""One part of a message whose content is a list."""

SHOWN: Mapping[type, tuple[str, str]] = {
    ImagePart: ("image_url", "image"),
    VideoUrlPart: ("video_url", "video"),
    FramesPart: ("video", "video"),
}
"""For each type of part that is not a text: its `type` in requests, and the `type` that chat templates know."""


class ChatMessage(Struct):
    """The keys of a message that this module reads. All other keys reach the template unchanged."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class ImageSource(NamedTuple):
    """Where an image comes from, and the field of the request that says it."""

    url: str
    field: str


Source = ImageSource | VideoSource
"""Where an image or a video comes from."""


def image_url(url: str) -> dict[str, Any]:
    """Return the part of a message that stands for the image at `url`."""
    return {"type": "image_url", "image_url": {"url": url}}


def image_field(message: int, part: int) -> str:
    """Return the field of an image in OpenAI's form of a conversation, by the indices of its message and its part."""
    return f"messages[{message}].content[{part}].image_url"


def image_sources(messages: Sequence[Any], fields: Mapping[str, str]) -> list[Source]:
    """Return the images and videos of a conversation that `chat_messages` has checked, in the order in which it returns
    the messages.

    `fields` has the names of the images' fields where these differ from the names in OpenAI's form.
    """
    sources: list[Source] = []
    for i in in_call_order(messages):
        content = messages[i].get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] == "image_url":
                field = image_field(i, j)
                sources.append(ImageSource(part["image_url"]["url"], fields.get(field, field)))
            elif part["type"] in ("video_url", "video"):
                sources.append(video_source(part, f"messages[{i}].content[{j}]"))
    return sources


def chat_messages(messages: Sequence[Any], *, images: bool = False) -> list[dict[str, Any]]:
    """Return the conversation in the form that templates expect. Raises InvalidRequest naming the message and key.

    The results of a message's calls of tools come behind it, in the order of the calls.

    With `images`, messages of the user may hold images and videos. The result has their places; `image_sources` returns
    their addresses.
    """
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if len(messages) > limits.MAX_MESSAGES:
        raise InvalidRequest(f"messages has at most {limits.MAX_MESSAGES} entries", param="messages")
    given = list(messages)
    # The list and the messages in it are two levels of nesting.
    check_nested(given, "messages", depth=2 + limits.MAX_MESSAGE_DEPTH, values=limits.MAX_MESSAGE_VALUES)
    made = [_message(message, f"messages[{i}]", images) for i, message in enumerate(given)]
    ordered = [made[i] for i in in_call_order(made)]
    name_results(ordered)
    return ordered


def _message(given: Any, where: str, images: bool) -> dict[str, Any]:
    """Return one message in the form that templates expect. `where` is its field in errors."""
    message = convert(given, ChatMessage, where)
    content = message.content
    if content is None:
        # The assistant's message may consist of tool calls, reasoning or a refusal alone; a tool may return nothing.
        if message.role not in ("assistant", "tool", "function"):
            raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
        content = ""
    entry = {key: value for key, value in given.items() if value is not None and key not in NO_EFFECT}
    # Templates know the role "system" only. "developer" is a newer name for it.
    entry["role"] = "system" if message.role == "developer" else message.role
    entry["content"] = content if isinstance(content, str) else _content(content, message.role, where, images)
    entry.pop("tool_calls", None)
    if message.role == "function":  # OpenAI's older form of calls and results
        entry["role"] = "tool"
    if message.function_call is not None:
        message.tool_calls = [{"type": "function", "function": entry.pop("function_call")}]
    if isinstance(thought := entry.get("reasoning_content", entry.get("reasoning")), str):
        entry["reasoning_content"] = thought  # the name that most templates know
        if not (message.tool_calls and entry["content"]):  # Some refuse a call with both.
            entry.setdefault("thinking", thought)
    if message.tool_calls:
        for i, call in enumerate(message.tool_calls):
            if call.get("type", "function") != "function":
                name = f"{where}.tool_calls[{i}].type"
                raise InvalidRequest(f"{name} must be 'function'", param=name, code="unsupported_parameter")
        entry["tool_calls"] = [_with_arguments(call) for call in message.tool_calls]
    return entry


def _content(parts: Sequence[ContentPart], role: str, where: str, images: bool) -> str | list[dict[str, str]]:
    """Return the content of a message: its text, or the list of its texts, images and videos if it has any of these.

    Raises InvalidRequest for an image or a video that the message may not hold.
    """
    texts: list[dict[str, str]] = []
    for i, part in enumerate(parts):
        if isinstance(part, TextPart | RefusalPart):
            texts.append({"type": "text", "text": part.text if isinstance(part, TextPart) else part.refusal})
            continue
        given, kind = SHOWN[type(part)]
        if not images or role != "user":
            field = f"{where}.content[{i}].{given}"
            why = f"messages of the user only may hold {kind}s" if images else "only text can be used here"
            raise InvalidRequest(f"{field}: {why}", param=field, code="unsupported_parameter")
        texts.append({"type": kind})
    has_images = any("text" not in part for part in texts)
    return texts if has_images else "".join(part["text"] for part in texts)


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments are an object. OpenAI's replies have them as JSON text."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return call | {"function": function | {"arguments": arguments_object(function.get("arguments"))}}
