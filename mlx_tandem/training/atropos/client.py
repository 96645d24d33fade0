"""The client of Atropos' trajectory API: a trainer registers, and then asks for batches."""

from __future__ import annotations

import asyncio
import http.client
from typing import Any
from urllib.parse import urlsplit

import msgspec

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.atropos.scored import ScoredData

SECONDS = 10.0
"""Most seconds that a request waits for the next bytes."""

MOST_BYTES = 256 << 20
"""Most bytes of a batch."""


class Unreachable(Exception):
    """The API does not answer, or its reply is not valid."""


class NotRegistered(Exception):
    """The API has no registered trainer, for example because it was started again."""


class _Batch(msgspec.Struct):
    """The reply to a request for a batch. `status` is there for errors only."""

    batch: list[ScoredData] | None = None
    status: str = ""


class _Info(msgspec.Struct):
    batch_size: int


def check_url(url: str) -> str:
    """Return the address of an API without a slash at its end. Raises InvalidRequest for what is no address."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or parts.username:
        raise InvalidRequest(
            f"'rl_training.atropos_url' is {url[:200]!a}; it must be like http://localhost:8001, the address of run-api"
        )
    return url.rstrip("/")


class Client:
    """A trainer's connection to the API at `url`. Each request has a connection of its own, and no proxy."""

    def __init__(self, url: str):
        self._parts = urlsplit(check_url(url))

    async def register(self, **fields: Any) -> int:
        """Register a trainer and return the number of sequences of each batch, which the first trainer has chosen.

        Raises Unreachable.
        """
        await self._ask("POST", "/register", msgspec.Raw, fields)
        info: _Info = await self._ask("GET", "/info", _Info)
        return info.batch_size

    async def batch(self) -> list[ScoredData] | None:
        """Return the next batch, which is a list of groups; None while there is none. Raises both errors."""
        found: _Batch = await self._ask("GET", "/batch", _Batch)
        if found.status == "error":
            raise NotRegistered
        return found.batch

    async def _ask(self, method: str, path: str, kind: type[Any], body: Any = None) -> Any:
        """Send a request and return its reply as `kind`, which is decoded on another thread. Raises Unreachable."""

        def asked() -> Any:
            return _decoded(self._wait(method, path, body), kind)

        return await asyncio.to_thread(asked)

    def _wait(self, method: str, path: str, body: Any) -> bytes:
        """Send a request and return the body of its reply. Raises Unreachable."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=SECONDS)
        try:
            headers = {"accept": "application/json", "content-type": "application/json"}
            content = None if body is None else msgspec.json.encode(body)
            connection.request(method, self._parts.path + path, content, headers)
            with connection.getresponse() as reply:
                found = reply.read(MOST_BYTES + 1)
        except (OSError, http.client.HTTPException) as e:
            raise Unreachable(f"{type(e).__name__}: {e}") from e
        finally:
            connection.close()
        if reply.status != 200:
            raise Unreachable(f"{method} {path} got the HTTP status {reply.status}")
        if len(found) > MOST_BYTES:
            raise Unreachable(f"{method} {path} got over {MOST_BYTES} bytes")
        return found


def _decoded(body: bytes, kind: type[Any]) -> Any:
    """Return a body as `kind`. Raises Unreachable for one of another form."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as e:
        raise Unreachable(f"the reply has another form: {e}") from e
