"""Results that clients ask for later: each has an id, and waits to be fetched for a while."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, NotFound, Overloaded, TandemError

POLL_SECONDS = 30.0
"""Longest that a request for a result waits for it. Clients wait 45 seconds."""

Media = Literal["json", "protobuf"]


class Result(Struct, frozen=True):
    """The body of a result, and its form."""

    content: bytes
    media: Media = "json"


class Gone(InvalidRequest):
    """The result is no longer kept; clients send the request again."""

    status = 410
    code = "not_found"


def _gone() -> Gone:
    return Gone("this result is no longer kept: send the request again", param="request_id")


class Promise:
    """A result that is there or will be: `outcome` is the result, or the error that came instead, or None."""

    __slots__ = ("_done", "fetched", "id", "outcome", "owner", "session", "task")

    def __init__(self, owner: str, session: str):
        """Begin without a result. `owner` is whoever may fetch it, and `session` the session that asked for it."""
        self.id = secrets.token_hex(16)
        self.owner = owner
        self.session = session
        self.outcome: Result | TandemError | None = None
        self.fetched = False
        self.task: asyncio.Task[Result | TandemError] | None = (
            None  # the work that cancelling this request ends; None: it cannot be
        )
        self._done = asyncio.Event()

    @property
    def size(self) -> int:
        """Bytes of the result."""
        return len(self.outcome.content) if isinstance(self.outcome, Result) else 0

    def settle(self, outcome: Result | TandemError) -> None:
        """Set the outcome, unless there is one."""
        if self.outcome is None:
            self.outcome = outcome
            self.task = None  # A task keeps its result for as long as somebody holds the task.
            self._done.set()

    async def wait(self, seconds: float) -> bool:
        """Wait for the outcome, `seconds` at most; return whether it is there."""
        try:
            await asyncio.wait_for(self._done.wait(), seconds)
        except TimeoutError:
            return False
        return True


class Promises:
    """All promises of a server.

    Results that are there are kept up to `most_bytes`, and up to `most` of them; those that were fetched go first, then
    the oldest.
    """

    def __init__(self, most: int = limits.MAX_TINKER_RESULTS, most_bytes: int = limits.MAX_TINKER_RESULT_BYTES):
        """Begin without promises."""
        self._most = most
        self._most_bytes = most_bytes
        self._open: dict[str, Promise] = {}
        self._settled: OrderedDict[str, Promise] = OrderedDict()  # the oldest first
        self._fetched: OrderedDict[str, None] = OrderedDict()  # ids of those that were fetched
        self.nbytes = 0  # bytes of the results that are kept
        self._gone: OrderedDict[str, None] = OrderedDict()  # ids of results that were dropped for others

    @property
    def waiting(self) -> int:
        """Number of requests whose results are not there."""
        return len(self._open)

    @property
    def kept(self) -> int:
        """Number of results that are kept."""
        return len(self._settled)

    def new(self, owner: str, session: str) -> Promise:
        """Make a promise. Raises Overloaded when too many requests wait for their results."""
        if len(self._open) >= self._most:
            raise Overloaded(f"{self._most} requests wait for their results, which is the most", retry_after=1.0)
        promise = Promise(owner, session)
        self._open[promise.id] = promise
        return promise

    def settle(self, promise: Promise, outcome: Result | TandemError) -> None:
        """Give a promise its outcome, and drop others that there is no room for any more."""
        if self._open.pop(promise.id, None) is None:
            return
        promise.settle(outcome)
        self._settled[promise.id] = promise
        self.nbytes += promise.size
        while len(self._settled) > self._most or (self.nbytes > self._most_bytes and len(self._settled) > 1):
            self._drop(next(iter(self._fetched or self._settled)))

    def get(self, id: str, owner: str) -> Promise:
        """Return a promise of this owner. Raises NotFound, or Gone for a result that was dropped."""
        promise = self._open.get(id) or self._settled.get(id)
        if promise is None and id in self._gone:
            raise _gone()
        if promise is None or promise.owner != owner:
            raise NotFound(f"there is no request {id[:64]!r}", param="request_id")
        return promise

    def fetched(self, promise: Promise) -> None:
        """Note that a result was fetched."""
        promise.fetched = True
        if promise.id in self._settled:
            self._fetched[promise.id] = None

    def forget(self, ids: Iterable[str], owner: str) -> None:
        """Forget results that their owner has fetched. Others are left as they are."""
        for id in ids:
            promise = self._settled.get(id)
            if promise is not None and promise.owner == owner:
                self._remove(id)

    def end(self, session: str) -> None:
        """Forget all promises of a session. Whoever waits for one is told that the session has ended."""
        error = NotFound("the session has ended", param="session_id")
        for promise in [p for p in self._open.values() if p.session == session]:
            del self._open[promise.id]
            if promise.task is not None:
                promise.task.cancel()
            promise.settle(error)
        for id in [id for id, p in self._settled.items() if p.session == session]:
            self._remove(id)

    def _drop(self, id: str) -> None:
        self._remove(id)
        self._gone[id] = None
        while len(self._gone) > self._most:
            self._gone.popitem(last=False)

    def _remove(self, id: str) -> None:
        promise = self._settled.pop(id)
        self.nbytes -= promise.size
        promise.outcome = _gone()  # Others may still hold the promise.
        self._fetched.pop(id, None)
