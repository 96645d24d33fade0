"""HTTP responses for errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.errors import TandemError
from mlx_tandem.server.headers import JSON_TYPE

ERRORS = "error_body"
"""The key in a request's scope for the function that writes error bodies in the form of the path's dialect."""


class ErrorReply:
    """An ASGI response with an error."""

    def __init__(
        self,
        error: TandemError,
        headers: Sequence[tuple[bytes, bytes]] = (),
        write: Callable[[TandemError], bytes] = error_body,
    ):
        """Prepare the response. `write` returns the body for the error."""
        self.status = error.status
        self._body = write(error)
        self._headers = [JSON_TYPE, (b"content-length", b"%d" % len(self._body)), *headers]
        if error.retry_after is not None:
            self._headers.append((b"retry-after", b"%d" % min(math.ceil(error.retry_after), 120)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the error."""
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})
