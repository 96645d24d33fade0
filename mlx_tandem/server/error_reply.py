"""An error as OpenAI's error object, and as an HTTP response."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from mlx_tandem.dialects.shapes import dumps
from mlx_tandem.errors import TandemError

JSON_TYPE = (b"content-type", b"application/json")


def error_body(error: TandemError) -> bytes:
    """OpenAI's error object."""
    return dumps({"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}})


class ErrorReply:
    """An error as an HTTP response."""

    def __init__(self, error: TandemError, headers: Sequence[tuple[bytes, bytes]] = ()):
        self.status = error.status
        self._body = error_body(error)
        self._headers = [JSON_TYPE, (b"content-length", b"%d" % len(self._body)), *headers]
        if error.retry_after is not None:
            self._headers.append((b"retry-after", b"%d" % min(math.ceil(error.retry_after), 120)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})
