"""The arguments of tool calls as JSON objects, for the dialects whose replies have them so."""

from __future__ import annotations

from typing import Any

import msgspec


def arguments_object(text: str) -> Any:
    """Return the arguments of a call as an object that JSON can be made of.

    Arguments that are no JSON object, such as those of an answer that was cut off, become the only member of an object,
    as Anthropic recommends.
    """
    try:
        msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}
    return msgspec.Raw((text or "{}").encode())
