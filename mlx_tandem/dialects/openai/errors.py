"""An error as OpenAI's error object, which is also the shape of errors that happen before a dialect is known."""

from __future__ import annotations

from mlx_tandem.decode import dumps
from mlx_tandem.errors import TandemError


def error_body(error: TandemError) -> bytes:
    """Return OpenAI's error object."""
    return dumps({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})
