"""Request bodies: media type and size checked, read under a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from mlx_tandem.decode import decode
from mlx_tandem.errors import InvalidRequest, ReceiveTimeout, TandemError, TooLarge, UnsupportedMedia

T = TypeVar("T")

PLAIN = ("", "application/x-www-form-urlencoded")
"""Content types of a curl that was told none: without a body, and with one."""

SMALL_BODY = 65_536
"""Bytes of an unread body up to which it is let in and dropped, so that the connection can be used again."""


@dataclass(frozen=True)
class BodyLimit:
    size: int  # bytes
    seconds: float  # until all of it has come
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a large body is decoded, so that the loop does something else between two of them."""


async def read_json(
    request: Request,
    kind: type[T],
    limit: BodyLimit,
    *,
    plain: bool = False,
    select: Callable[[Any], Any] = lambda value: value,
) -> T:
    """Return the body as `kind`, after `select` has been applied to what the JSON says. A browser page cannot send this
    content type to another origin without asking first.

    With `plain` no body is {}, and what curl sends without being told a content type is taken, too. A page can send
    that without asking, but not without its Origin.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not (plain and media in PLAIN and "origin" not in request.headers):
        raise UnsupportedMedia("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not supported")
    try:
        async with asyncio.timeout(limit.seconds):
            body = await _read(request, limit.size)
    except TimeoutError:
        raise ReceiveTimeout(f"the body did not come within {limit.seconds:g} s") from None
    if not body and not plain:
        message = "the body is empty: send JSON, with a Content-Length header or Transfer-Encoding: chunked"
        raise InvalidRequest(message, code="invalid_json")
    if len(body) <= SMALL_BODY:
        return decode(body or b"{}", kind, select)
    async with limit.turn:
        await asyncio.sleep(0)
        return decode(body, kind, select)


async def _read(request: Request, limit: int) -> bytes:
    too_large = TooLarge(f"the body is over the limit of {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def refusal_headers(error: TandemError, head: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the header that ends the connection, for an answer that leaves more of a body unread than is worth
    receiving. `head`: the request's headers."""
    if error.status in (408, 413, 415) or (error.status in (401, 403, 429, 503) and _leaves_much(head)):
        return [(b"connection", b"close")]
    return []


def _leaves_much(head: Iterable[tuple[bytes, bytes]]) -> bool:
    # After a refusal, one who waits for 100 Continue may send the body or not: nobody can tell what comes next.
    return any(
        name in (b"transfer-encoding", b"expect")
        or (name == b"content-length" and not (value.isdigit() and int(value[:20]) <= SMALL_BODY))
        for name, value in head
    )
