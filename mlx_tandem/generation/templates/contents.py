"""The form in which a chat template reads the content of a message, which is found by rendering a greeting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mlx_tandem.generation.parts import IMAGE_MARK, Part

ContentForm = Literal["any", "text", "list"]
"""Whether a content has to be a text or a list of parts, or may be either of them."""

GREETING: Mapping[str, Any] = {"role": "user", "content": "Hello!"}
"""The conversation that is rendered to find the form."""


def in_form(message: Mapping[str, Any], form: ContentForm) -> Mapping[str, Any]:
    """Return a message with its content in this form. In a text, IMAGE_MARK on a line of its own is an image."""
    content = message.get("content")
    if form == "list" and isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    if form == "text" and isinstance(content, list):
        return {**message, "content": "".join(part.get("text", f"{IMAGE_MARK}\n") for part in content)}
    return message


def form_of(as_text: Sequence[Part] | None, as_list: Sequence[Part] | None) -> ContentForm:
    """Return the form that a template reads. The arguments are the greeting's renderings; None where it failed."""
    reads_text, reads_list = _prints_greeting(as_text), _prints_greeting(as_list)
    if reads_text == reads_list:  # A template that prints no greeting may be made for other conversations.
        return "any"
    return "text" if reads_text else "list"


def _prints_greeting(parts: Sequence[Part] | None) -> bool:
    """Return whether a rendering shows the greeting, and not as Python or JSON would write a list."""
    text = "".join(piece for piece, _ in parts or ())
    return GREETING["content"] in text and "'type'" not in text and '"type"' not in text
