"""The arguments of tool calls as JSON objects, for the dialects whose replies have them so."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "INVALID_JSON"
"""The key under which a text that is no JSON object is wrapped."""


def arguments_in_reply(text: str) -> Any:
    """Return the arguments of a call in the form in which a reply has them: an object that can be encoded as JSON.

    Text that is no JSON object, such as that of an answer that was cut off, is wrapped in an object, as Anthropic
    recommends.
    """
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID: text}
    return msgspec.Raw((text or "{}").encode())


def arguments_sent_back(value: Any) -> Any:
    """Return the arguments of a call in a message that a client sends back.

    If `arguments_in_reply` wrapped a text, return this text.
    """
    return value[INVALID] if isinstance(value, dict) and set(value) == {INVALID} else value
