"""Headers that replies have in common."""

from __future__ import annotations

JSON_TYPE = (b"content-type", b"application/json")
EVENTS_TYPE = (b"content-type", b"text/event-stream; charset=utf-8")
