"""Handling errors of requests: each reply has the form of its dialect, and tells nothing about internal errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.errors import InvalidRequest, NotFound, TandemError
from mlx_tandem.generation.metrics import Metrics
from mlx_tandem.log import log_exception
from mlx_tandem.server.body import refusal_headers
from mlx_tandem.server.error_log import note
from mlx_tandem.server.error_reply import ERRORS, ErrorReply
from mlx_tandem.server.request_id import request_id

Handler = Callable[[Request, Exception], Awaitable[Any]]


def error_handlers(front: ServerFront) -> Mapping[Any, Handler]:
    """Return the handler of each class of exceptions."""

    async def on_tandem_error(request: Request, error: Exception) -> ASGIApp:
        assert isinstance(error, TandemError)
        note(front.metrics, error, request.scope)
        extra = refusal_headers(error, request.scope["headers"])
        if front.client.state == "draining":
            extra = [(b"connection", b"close")]
        return ErrorReply(error, extra, request.scope.get(ERRORS, error_body))

    async def on_http_exception(request: Request, error: Exception) -> ASGIApp:
        assert isinstance(error, HTTPException)
        path = f"{request.url.path[:100]!a}"
        extra = []
        if error.status_code == 404:
            wrapped: TandemError = NotFound(f"there is no {request.method} {path}")
        else:
            takes = _takes(request)
            wrapped = InvalidRequest(
                f"{path} does not take {request.method}: send {_how(takes)}", code="method_not_allowed"
            )
            wrapped.status = error.status_code
            extra = [(b"allow", ", ".join(takes).encode())]
        note(front.metrics, wrapped, request.scope)
        return ErrorReply(wrapped, extra, request.scope.get(ERRORS, error_body))

    return {TandemError: on_tandem_error, HTTPException: on_http_exception}


MOST_HEADER = 1024
"""Most bytes of a header's value in a reply."""

_NOT_IN_HEADERS = re.compile(rb"[^\x20-\x7e]")


def header_value(value: bytes) -> bytes:
    """Return `value` with everything but printable ASCII escaped, so that no text can begin a new header."""
    return _NOT_IN_HEADERS.sub(lambda found: b"\\x%02x" % found[0][0], value)[:MOST_HEADER]


def _takes(request: Request) -> dict[str, bool]:
    """Return the methods that the request's path accepts, in alphabetical order, and whether each needs a body."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {
        method: any(getattr(route, "needs_body", False) for route in routes if method in route.methods)
        for method in sorted({method for route in routes for method in route.methods})
    }


def _how(takes: Mapping[str, bool]) -> str:
    """Return a text that says which request to send instead, given the methods and whether each needs a body."""
    shown = {method: needs_body for method, needs_body in takes.items() if method != "HEAD"}
    return " or ".join(f"{method} with a JSON body" if needs_body else method for method, needs_body in shown.items())


class Guard:
    """ASGI middleware that handles unexpected errors and cleans the headers of all replies.

    An unexpected error becomes a 500 with a fixed text, and a log line that quotes nothing from the request. Every
    reply gets the request's id as its `X-Request-Id`.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics):
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and clean the headers of its reply."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if not started:
                started = True
                headers = [*message.get("headers", ()), (b"x-request-id", request_id(scope).encode())]
                message["headers"] = [(name, header_value(value)) for name, value in headers]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            pass
        except Exception as e:
            name = request_id(scope)
            log_exception("request failed", e, request=name, method=scope["method"])
            error = TandemError(f"internal error; the log has more under {name}")
            self._metrics.count_error(error, in_stream=started)
            if not started:
                await ErrorReply(error, (), scope.get(ERRORS, error_body))(scope, receive, watched)
