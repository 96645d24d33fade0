"""Anthropic's error object."""

from __future__ import annotations

from typing import Any

from mlx_tandem.dialects.route import ErrorForm
from mlx_tandem.errors import ContextOverflow, TandemError
from mlx_tandem.strict_json import dumps

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's name for the errors of an HTTP status. All others are `invalid_request_error` below 500, or
`api_error`.
"""


_NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""The details of the refusal of `thread`. The tool runners of Anthropic's packages then send the whole conversation."""


def error_object(error: TandemError) -> dict[str, Any]:
    """Return Anthropic's object for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": error.named}
    if isinstance(error, ContextOverflow):
        told["message"] = f"prompt is too long: {error.prompt} tokens > {error.most} maximum"
    elif error.param == "thread" and error.code == "unsupported_parameter":
        told["details"] = _NO_THREADS
    return {"type": "error", "error": told}


def error_body(error: TandemError) -> bytes:
    """Return the JSON body with Anthropic's error object."""
    return dumps(error_object(error))


_TEXTS = {name: {"type": "string"} for name in ("type", "message")}
_OBJECT = {
    "type": "object",
    "properties": _TEXTS | {"details": {"type": "object"}},
    "required": list(_TEXTS),
    "additionalProperties": False,
}

ERRORS = ErrorForm(
    error_body,
    {
        "type": "object",
        "properties": {"type": {"const": "error"}, "error": _OBJECT},
        "required": ["type", "error"],
        "additionalProperties": False,
    },
    "/v1/messages",
)
"""The form of Anthropic's errors."""
