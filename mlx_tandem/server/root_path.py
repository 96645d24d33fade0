"""The path that a reverse proxy serves this server under."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that takes the prefix away from paths that have it. Paths without it are taken as they are, from
    proxies that have taken it away themselves and from probes of the server itself."""

    def __init__(self, app: ASGIApp, prefix: str):
        self._app = app
        self._prefix = f"{prefix}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(self._prefix):
            scope["path"] = scope["path"][len(self._prefix) - 1 :]
        await self._app(scope, receive, send)
