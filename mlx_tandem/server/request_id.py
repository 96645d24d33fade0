"""The id of a request, which is the client's `X-Request-Id` or one of ours. The reply and log lines carry it."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, MutableMapping
from typing import Any

from mlx_tandem import limits


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id; an empty text if there is none, more than one, or one with characters not allowed."""
    values = [value for name, value in headers if name == b"x-request-id"]
    text = values[0].decode("latin-1") if len(values) == 1 else ""
    return text if limits.REQUEST_ID.fullmatch(text) else ""


def request_id(scope: MutableMapping[str, Any], ours: str = "") -> str:
    """Return the id of a request: the client's, else `ours`, else a new one. Every call returns the same id."""
    found: str = scope.get("request_id") or given_id(scope.get("headers", ())) or ours or f"req-{secrets.token_hex(12)}"
    scope["request_id"] = found
    return found
