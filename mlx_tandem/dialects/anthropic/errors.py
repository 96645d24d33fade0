"""Anthropic's error object."""

from __future__ import annotations

from typing import Any

from mlx_tandem.dialects.route import ErrorForm
from mlx_tandem.errors import TandemError
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


def error_object(error: TandemError) -> dict[str, Any]:
    """Return Anthropic's object for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.named}}


def error_body(error: TandemError) -> bytes:
    """Return the JSON body with Anthropic's error object."""
    return dumps(error_object(error))


_TEXTS = {name: {"type": "string"} for name in ("type", "message")}
_OBJECT = {"type": "object", "properties": _TEXTS, "required": list(_TEXTS), "additionalProperties": False}

ERRORS = ErrorForm(
    error_body,
    {
        "type": "object",
        "properties": {"type": {"const": "error"}, "error": _OBJECT},
        "required": ["type", "error"],
        "additionalProperties": False,
    },
)
"""The form of Anthropic's errors."""
