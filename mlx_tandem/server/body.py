"""Reading request bodies, with checks of their media type, size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from mlx_tandem.dialects.route import Received
from mlx_tandem.errors import InvalidRequest, ReceiveTimeout, TandemError, TooLarge, UnsupportedMedia
from mlx_tandem.generation.caller import CALLER
from mlx_tandem.server.receiving import SMALL_BODY, Incoming, Receiving
from mlx_tandem.strict_json import decode

T = TypeVar("T")


@dataclass(frozen=True)
class BodyLimit:
    """The limits of a request body."""

    size: int  # most bytes
    seconds: float  # most seconds until all of it has arrived
    receiving: Receiving  # what counts the bytes of all bodies


async def read_json(
    request: Request,
    kind: type[T],
    limit: BodyLimit,
    incoming: Incoming,
    *,
    others: Collection[str] = (),
    optional: bool = False,
    prepare: Callable[[Any], Any] = lambda value: value,
) -> T:
    """Return the body as `kind`, after `prepare` has been applied to the decoded JSON. Its bytes count in `incoming`.

    The content type has to be application/json, which a web page cannot send to another origin without a preflight, or
    one of `others`. A web page can send PLAIN without a preflight, but then its request has an Origin header, and such
    a request is refused. With `optional`, a missing body counts as {} and needs no content type.

    Raises UnsupportedMedia, ReceiveTimeout, TooLarge, Overloaded, InvalidRequest, and ClientDisconnect when the client
    leaves.
    """
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    named = media == "application/json" or (media in others and "origin" not in request.headers)
    if not named and not (optional and not media and "origin" not in request.headers):
        raise UnsupportedMedia("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not supported")
    body = await _read_in_time(request, limit, incoming)
    if body and not named:
        raise UnsupportedMedia("Content-Type must be application/json")
    if not body and not optional:
        message = "the body is empty: send JSON, with a Content-Length header or Transfer-Encoding: chunked"
        raise InvalidRequest(message, code="invalid_json")
    if len(body) <= SMALL_BODY:
        return decode(body or b"{}", kind, prepare)
    async with limit.receiving.turn:
        await asyncio.sleep(0)
        return decode(body, kind, prepare)


async def read_bytes(request: Request, limit: BodyLimit, incoming: Incoming) -> Received:
    """Return the body as it was sent. Its bytes count in `incoming`. Raises what `read_json` raises for its size."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    return Received(await _read_in_time(request, limit, incoming), media, encoding)


async def _read_in_time(request: Request, limit: BodyLimit, incoming: Incoming) -> bytes:
    """Return the whole body. Raises ReceiveTimeout, TooLarge, Overloaded, and ClientDisconnect."""
    try:
        async with asyncio.timeout(limit.seconds) as incoming.timer:
            return await _read(request, limit.size, incoming)
    except TimeoutError:
        if incoming.lost is not None:
            raise incoming.lost from None
        raise ReceiveTimeout(f"the body did not come within {limit.seconds:g} s") from None


async def _read(request: Request, limit: int, incoming: Incoming) -> bytes:
    """Return the whole body. Raises TooLarge for more than `limit` bytes, Overloaded, and ClientDisconnect."""
    too_large = TooLarge(f"the body is over the limit of {limit} bytes")
    length = request.headers.get("content-length", "")
    is_announced = length.isascii() and length.isdigit()
    if is_announced and int(length[:20]) > limit:
        raise too_large
    upload = CALLER.get().upload
    if is_announced:
        upload(int(length))
    parts: list[bytes] = []
    try:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part = message.get("body", b"")
            if incoming.size + len(part) > limit:
                raise too_large
            if part:
                incoming.grow(len(part))
                if not is_announced:
                    upload(len(part))
            parts.append(part)
            if not message.get("more_body", False):
                incoming.complete()
                return b"".join(parts)
    finally:
        parts.clear()  # The frame lives on in the traceback of an error.


def refusal_headers(error: TandemError, head: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the header that ends the connection if an error reply leaves a large part of a body unread, else [].

    `head` has the request's headers.
    """
    if error.status in (408, 413, 415) or (error.status in (401, 403, 429, 503) and _leaves_much(head)):
        return [(b"connection", b"close")]
    return []


def _leaves_much(head: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request with these headers may have a body of more than SMALL_BODY bytes.

    A client that waits for 100 Continue also counts: after a refusal it may send the body or the next request.
    """
    return any(
        name in (b"transfer-encoding", b"expect")
        or (name == b"content-length" and not (value.isdigit() and int(value[:20]) <= SMALL_BODY))
        for name, value in head
    )
