"""The client of a leader, which followers and trainers share. Each request has a connection of its own, without a
proxy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote, urlsplit

import msgspec
from msgspec import Struct

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.http_client import Connection, HttpError, NotSuited, bearer
from mlx_tandem.log import log
from mlx_tandem.printable import printable
from mlx_tandem.training.cluster.wire import (
    CHUNK,
    MOST_REPLY,
    PATH,
    Base,
    Contribution,
    Feed,
    File,
    Item,
    Items,
    Publication,
    Received,
    decode,
)

GRACE = 10.0
"""Seconds for which a request waits for its reply, in addition to those that it asks the leader to wait."""

Message = TypeVar("Message", bound=Struct)


class Unreachable(Exception):
    """The leader does not answer, or cannot do what it was asked now.

    A later attempt may succeed unless `lasting` is set: something answers then that does not speak HTTP, or whose
    certificate is not trusted.
    """

    def __init__(self, reason: str, *, lasting: bool = False):
        super().__init__(reason)
        self.lasting = lasting


class Refused(Exception):
    """The leader answers, and refuses: the key, the base or what was sent is wrong.

    `status` is the HTTP status; 0 where the reply itself is wrong.
    """

    def __init__(self, reason: str, status: int = 0):
        super().__init__(reason)
        self.status = status


def check_url(address: str) -> str:
    """Return the URL of a leader at `address`, HOST:PORT or a URL. Raises InvalidRequest for what is no address."""
    url = address if "//" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        has_port = parts.port != 0 and (parts.port or "//" in address)
        known = parts.scheme in ("http", "https") and parts.hostname and has_port
    except ValueError:
        known = False
    if not known or parts.query or parts.fragment or parts.username or parts.path.strip("/"):
        raise InvalidRequest(
            f"'cluster.connect_to' is {address[:200]!a}; it must be HOST:PORT, or a URL like https://node1:8000",
            param="connect_to",
        )
    return url.rstrip("/")


class LeaderClient:
    """Requests to one leader, with its API key. All methods raise Unreachable and Refused."""

    def __init__(self, address: str, key: str):
        """Prepare requests to the leader at `address`. An empty key is not sent. Raises InvalidRequest."""
        self.url = check_url(address)
        self._headers = {"Connection": "close", "Accept": "application/json", **bearer(key)}

    async def base(self) -> Base:
        """Return the leader's base."""
        return _decoded(await self._ask("GET", "/base"), Base)

    async def feed(self, after: int = 0, leader: str = "", wait: float = 0.0) -> Feed:
        """Return the leader's adapters once they are newer than `after` of its run `leader`, or after `wait` s."""
        path = f"/versions?after={after}&leader={leader}&wait={wait:g}"
        return _decoded(await self._ask("GET", path, seconds=wait + GRACE), Feed)

    async def chunk(self, file: File, offset: int) -> bytes:
        """Return bytes of a file from `offset` on."""
        return await self._ask("GET", f"/files/{file.sha256}?offset={offset}", most=CHUNK)

    async def upload(self, trainer: str, file: File, offset: int, content: bytes) -> int:
        """Send bytes of a trainer's file from `offset` on, and return how many the leader has of it from this trainer.

        The first call has no bytes: its result says from where on the leader needs them.
        """
        path = f"/files/{file.sha256}?trainer={trainer}&name={quote(file.name)}&size={file.size}&offset={offset}"
        return _decoded(await self._ask("PUT", path, content), Received).received

    async def publish(self, publication: Publication) -> None:
        """Let the leader serve a version, whose files it has."""
        await self._ask("POST", "/versions", msgspec.json.encode(publication))

    async def contribute(self, contribution: Contribution) -> None:
        """Hand in what was learned in a round; the leader has the files."""
        await self._ask("POST", "/contributions", msgspec.json.encode(contribution))

    async def send(self, base: str, queue: str, items: Sequence[Item]) -> None:
        """Send trajectories, which are on the leader's drive when this returns."""
        await self._ask("POST", "/trajectories", msgspec.json.encode(Items(base, queue, tuple(items))))

    async def take(self, trainer: str, queue: str, after: int, most: int, wait: float) -> Items:
        """Return trajectories with numbers above `after` in `queue`. The leader removes those up to it."""
        path = f"/trajectories?trainer={trainer}&queue={queue}&after={after}&most={most}&wait={wait:g}"
        return _decoded(await self._ask("GET", path, seconds=wait + GRACE), Items)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, *, seconds: float = GRACE, most: int = MOST_REPLY
    ) -> bytes:
        """Return the body of the reply to one request."""
        pieces: list[bytes] = []
        total = 0

        def take(piece: bytes) -> None:
            nonlocal total
            total += len(piece)
            if total > most:
                raise HttpError(f"the reply is over {most} bytes")
            pieces.append(piece)

        try:
            connection = Connection.to(self.url, self._headers)
            try:
                async with asyncio.timeout(seconds):
                    status = await connection.request(method, PATH + path, body, take)
            finally:
                connection.close()
        except TimeoutError:
            raise Unreachable(f"no answer from {self.url} within {seconds:g} s") from None
        except HttpError as e:
            raise Unreachable(str(e), lasting=isinstance(e, NotSuited)) from None
        content = b"".join(pieces)
        if status == 200:
            return content
        reason = f"{self.url} answers {status}: {_message(content)}"
        raise Unreachable(reason) if status in (408, 409, 429) or status >= 500 else Refused(reason, status)


class Trouble:
    """The last error of a task, which is logged once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.error = ""
        """The error that has not been overcome; empty if there is none."""

    def happened(self, event: str, error: str) -> None:
        """Record an error."""
        if error != self.error:
            log(event, logging.WARNING, leader=self._url, error=error)
        self.error = error

    def over(self) -> None:
        """Record that it works."""
        if self.error:
            log("the leader answers again", leader=self._url)
        self.error = ""


def _decoded(content: bytes, kind: type[Message]) -> Message:
    try:
        return decode(content, kind)
    except InvalidRequest as e:
        raise Refused(f"the reply has another form: {e.message}") from None


def _message(content: bytes) -> str:
    """Return the message of an error's body, shortened."""
    try:
        return printable(str(msgspec.json.decode(content)["error"]["message"]), 300)
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError):
        return "this is no error of a leader, so another program may be at this address"
