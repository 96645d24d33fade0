"""OpenAI's error object, which is also the form of errors that occur before the dialect is known."""

from __future__ import annotations

from mlx_tandem.errors import TandemError
from mlx_tandem.strict_json import dumps


def error_body(error: TandemError) -> bytes:
    """Return the JSON body with OpenAI's error object."""
    return dumps({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})
