"""Ollama's error object."""

from __future__ import annotations

from mlx_tandem.dialects.route import ErrorForm
from mlx_tandem.errors import TandemError
from mlx_tandem.strict_json import dumps


def error_body(error: TandemError) -> bytes:
    """Return the JSON body with the error's message."""
    return dumps({"error": error.named})


ERRORS = ErrorForm(
    error_body,
    {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
        "additionalProperties": False,
    },
    "/api",
)
"""The form of Ollama's errors."""
