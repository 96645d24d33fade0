"""The arguments of tool calls as JSON objects, for the dialects whose replies have them so."""

from __future__ import annotations

from typing import Any

import msgspec

INVALID = "INVALID_JSON"
"""The member of an object that has the text of arguments that are no JSON object."""


def arguments_object(text: str) -> Any:
    """Return the arguments of a call as an object that JSON can be made of.

    Arguments that are no JSON object, such as those of an answer that was cut off, become the only member of an object,
    as Anthropic recommends.
    """
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {INVALID: text}
    return msgspec.Raw((text or "{}").encode())


def arguments_sent_back(value: Any) -> Any:
    """Return the arguments of a call in a message that a client sends back.

    They are the text itself where `arguments_object` made an object of it.
    """
    return value[INVALID] if isinstance(value, dict) and set(value) == {INVALID} else value
