"""What every request passes on its way: errors as OpenAI's error object, and nothing unexpected told to a client."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_tandem.errors import InvalidRequest, NotFound, TandemError
from mlx_tandem.server.body import refusal_headers
from mlx_tandem.server.error_reply import ErrorReply
from mlx_tandem.server.front import Front
from mlx_tandem.server.log import log_exception

Handler = Callable[[Request, Exception], Awaitable[Any]]


def error_handlers(front: Front) -> Mapping[Any, Handler]:
    """By the class of the exception."""

    async def on_tandem_error(request: Request, error: Exception) -> ASGIApp:
        assert isinstance(error, TandemError)
        front.metrics.errors[str(error.code)] += 1
        extra = refusal_headers(error, request.scope["headers"])
        if front.client.state == "draining":
            extra = [(b"connection", b"close")]
        return ErrorReply(error, [(b"x-request-id", _request_id()), *extra])

    async def on_http_exception(request: Request, error: Exception) -> ASGIApp:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            wrapped: TandemError = NotFound(f"there is no {request.method} {request.url.path[:100]!a}")
        else:
            wrapped = InvalidRequest(str(error.detail), code="method_not_allowed")
            wrapped.status = error.status_code
        extra = [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
        front.metrics.errors[str(wrapped.code)] += 1
        return ErrorReply(wrapped, [(b"x-request-id", _request_id()), *extra])

    return {TandemError: on_tandem_error, HTTPException: on_http_exception}


MOST_HEADER = 1024
"""Bytes of a header's value in an answer."""

_NOT_IN_HEADERS = re.compile(rb"[^\x20-\x7e]")


def header_value(value: bytes) -> bytes:
    """Return `value` with everything but printable ASCII escaped, so that no text can begin a header of its own."""
    return _NOT_IN_HEADERS.sub(lambda found: b"\\x%02x" % found[0][0], value)[:MOST_HEADER]


class Guard:
    """The last line: no answer has a header that was not meant, and what nobody expected becomes a 500 with a fixed
    text and one log line that quotes nothing."""

    def __init__(self, app: ASGIApp, on_error: Callable[[], None]):
        self._app = app
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start":
                headers = [(name, header_value(value)) for name, value in message.get("headers", ())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as e:
            request = _request_id()
            log_exception("request failed", e, request=request.decode(), method=scope["method"])
            self._on_error()
            if not started:
                error = TandemError(f"internal error; the log has more under {request.decode()}")
                await ErrorReply(error, [(b"x-request-id", request)])(scope, receive, send)


def _request_id() -> bytes:
    return b"req-" + secrets.token_hex(12).encode()
