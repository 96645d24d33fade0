"""Server-sent events that have names, which several dialects write."""

from __future__ import annotations


def event(name: bytes, data: bytes) -> bytes:
    """Return the bytes of one event with the name and the JSON `data`."""
    return b"event: %b\ndata: %b\n\n" % (name, data)
