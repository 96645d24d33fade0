"""The header of a reply that names what was left out of its request."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

SKIPPED = b"x-tandem-skipped"
"""The name of the header."""


class WithSkippedHeader:
    """A reply with the header, which has the fields of the request that were left out and what they were."""

    def __init__(self, reply: ASGIApp, fields: Sequence[str]):
        self._reply = reply
        self._header = (SKIPPED, ", ".join(fields).encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), self._header]}
            await send(message)

        await self._reply(scope, receive, sending)
