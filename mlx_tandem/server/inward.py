"""Requests that the server makes to itself: those of batches, answered as requests over HTTP are."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import Message

from mlx_tandem.dialects.batches.lines import LineReply
from mlx_tandem.dialects.openai.errors import error_body
from mlx_tandem.errors import Forbidden, Overloaded, TandemError
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.generation.prompted import CLIENT
from mlx_tandem.log import log_exception
from mlx_tandem.server.keyring import Keyring
from mlx_tandem.server.request_id import request_id


class Inward:
    """The way to an application's routes past its gate, for requests whose caller has shown the key before."""

    def __init__(self, app: Starlette, keyring: Keyring):
        """Call the routes of `app`, with its handlers of errors, for callers whom the keyring knows."""
        self._app = app
        self._keyring = keyring
        self._routes = ExceptionMiddleware(app.router, handlers=app.exception_handlers)

    async def __call__(self, path: str, body: bytes, key: str) -> LineReply:
        """Return the reply to a POST of this JSON with the key of this name, in a task of its own. Cancelling the call
        cancels the request.
        """
        caller = self._keyring.named(key)
        if caller is None:
            gone = Forbidden(f"the key '{key}', with which the batch was created, is no longer known", code="forbidden")
            return LineReply(403, error_body(gone), "")
        CALLER.set(caller)
        CLIENT.set(hash(caller.tenant) if caller.tenant else 0)
        try:
            caller.check_request()
        except Overloaded as e:
            return LineReply(e.status, error_body(e), "")
        with caller.request():
            return await self._answer(path, body)

    async def _answer(self, path: str, body: bytes) -> LineReply:
        """Return the reply of the routes to a POST of this JSON."""
        came = False
        status, parts = 500, []

        async def receive() -> Message:
            nonlocal came
            if came:
                await asyncio.Event().wait()  # this client never disconnects
            came = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        scope = self._scope(path, len(body))
        try:
            await self._routes(scope, receive, send)
        except Exception as e:
            log_exception("request of a batch failed", e, request=request_id(scope))
            return LineReply(500, error_body(TandemError("internal error; the log has more")), request_id(scope))
        return LineReply(status, b"".join(parts), request_id(scope))

    def _scope(self, path: str, length: int) -> dict[str, Any]:
        """Return the scope of a POST to a path with a body of JSON."""
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(length).encode())],
            "client": None,
            "server": None,
            "app": self._app,
            "key_shown": True,
        }
