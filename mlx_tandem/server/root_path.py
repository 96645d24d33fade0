"""The path prefix under which a reverse proxy serves this server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that removes the prefix from paths that have it.

    Paths without it are accepted as they are: they come from proxies that remove the prefix, and from health probes.
    """

    def __init__(self, app: ASGIApp, prefix: str):
        self._app = app
        self._prefix = f"{prefix}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Remove the prefix from the path, and pass the request on."""
        if scope["path"].startswith(self._prefix):
            scope["path"] = scope["path"][len(self._prefix) - 1 :]
        await self._app(scope, receive, send)
