"""The reply to `/tokenize` and `/detokenize`. It may be long, so it is admitted by its bytes and sent in pieces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Generic, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from mlx_tandem.dialects.front import ServerFront
from mlx_tandem.server.body import BodyLimit, read_json
from mlx_tandem.server.headers import JSON_TYPE
from mlx_tandem.server.receiving import SMALL_BODY

T = TypeVar("T")

PIECE = 65_536
"""Most bytes of one write. A slow client then never leaves a whole reply in the connection's buffer."""


class TextReply(Generic[T]):
    """An ASGI response that reads the body of a request, and sends the JSON that a handler makes of it."""

    def __init__(
        self,
        front: ServerFront,
        request: Request,
        kind: type[T],
        limit: BodyLimit,
        work: Callable[[ServerFront, T], Awaitable[Sequence[bytes]]],
    ):
        """Prepare the reply. The body is decoded as `kind`, and `work` returns the pieces of the JSON."""
        self._front = front
        self._request = request
        self._kind = kind
        self._limit = limit
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit the request, read its body, and send the reply in pieces."""
        self._front.client.check_ready()
        admission, size = self._front.text_admission, self._size()
        is_long = size > SMALL_BODY
        with admission.admitted(size):
            with self._limit.receiving.body() as incoming:
                body = await read_json(self._request, self._kind, self._limit, incoming)
            async with admission.place(size) if is_long else nullcontext():
                if is_long and await self._request.is_disconnected():
                    raise ClientDisconnect
                pieces = await self._work(self._front, body)
                length = sum(map(len, pieces))
                with nullcontext() if is_long else admission.counted(length):
                    head = [JSON_TYPE, (b"content-length", b"%d" % length)]
                    await send({"type": "http.response.start", "status": 200, "headers": head})
                    for piece in _cut(pieces):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    await send({"type": "http.response.body"})

    def _size(self) -> int:
        """Return the most bytes that the body can have, by its Content-Length or else by the limit."""
        length = self._request.headers.get("content-length", "")
        known = length.isascii() and length.isdigit()
        return min(int(length[:20]), self._limit.size) if known else self._limit.size


def _cut(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in pieces of at most PIECE bytes."""
    for piece in pieces:
        for start in range(0, len(piece), PIECE):
            yield piece[start : start + PIECE]
