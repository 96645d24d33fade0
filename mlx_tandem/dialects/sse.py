"""The text that several dialects write into streams of server-sent events: events that have names, and a comment."""

from __future__ import annotations

COMMENT = b": keep-alive\n\n"
"""A comment, which clients skip. It shows them and the proxies between that the stream is alive."""


def event(name: bytes, data: bytes) -> bytes:
    """Return the bytes of one event with the name and the JSON `data`."""
    return b"event: %b\ndata: %b\n\n" % (name, data)
