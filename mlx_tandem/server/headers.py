"""Headers that several kinds of replies share."""

from __future__ import annotations

JSON_TYPE = (b"content-type", b"application/json")
