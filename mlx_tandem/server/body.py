"""Request bodies: media type and size checked, read under a limit."""

from __future__ import annotations

from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from mlx_tandem.errors import TandemError, TooLarge
from mlx_tandem.server.decode import decode

T = TypeVar("T")


class UnsupportedMedia(TandemError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


async def read_json(request: Request, kind: type[T], limit: int) -> T:
    """The body as `kind`. A browser page cannot send this content type to another origin without asking first."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise UnsupportedMedia("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("compressed bodies are not supported")
    return decode(await _read(request, limit), kind)


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
