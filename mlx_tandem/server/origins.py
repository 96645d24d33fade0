"""Access for web pages of other origins (CORS)."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


class Origins(CORSMiddleware):
    """ASGI middleware that lets web pages of `origins` use the server and read the headers of its own in replies.

    It runs before the key is checked, because a preflight (OPTIONS) carries no key. It allows no cookies, since the
    server uses none. A preflight that is not granted is passed on, and is refused like any other OPTIONS.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]):
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_private_network=True,  # A page from the internet may ask a server in the user's own network.
            expose_headers=["X-Request-Id", "X-Tandem-Skipped", "Retry-After"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a granted preflight; pass all other requests on."""
        if scope["method"] == "OPTIONS" and not self._grants(Headers(scope=scope)):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _grants(self, head: Headers) -> bool:
        """Return whether a preflight with these headers is granted."""
        method = head.get("access-control-request-method")
        return self.is_allowed_origin(head.get("origin", "")) and method in self.allow_methods
