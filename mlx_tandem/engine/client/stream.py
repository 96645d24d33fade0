"""Streams: the deltas of one submission, as the front reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol

from mlx_tandem.errors import TandemError
from mlx_tandem.types import Delta, Request


class Owner(Protocol):
    """The part of the client that its streams use."""

    def cancel(self, request: int, choice: int | None = None) -> None:
        """Tell the engine that nobody waits for a request, or for one choice of it, any more."""

    def forget(self, request: int) -> None:
        """Drop the stream of a request whose end it has seen."""


class Stream:
    """An iterator over lists, each with all deltas that arrived since the last one, in order.

    It ends when every choice has ended, and raises the TandemError that ended a request otherwise. Leaving its `async
    with` block early cancels the choices that still run. Choices are numbered over all requests: choice i of request k
    has the number k * n + i (`index`).
    """

    __slots__ = (
        "_error",
        "_live",
        "_mailbox",
        "_n",
        "_nudged",
        "_open",
        "_owner",
        "_requests",
        "_unaccepted",
        "_waiter",
        "adapter",
        "first",
        "first_token_at",
        "last_token_at",
        "preemptions",
        "started",
    )

    def __init__(self, owner: Owner, requests: Sequence[Request]):
        self._owner = owner
        self.first = requests[0].id  # the ids of the others follow it
        self.adapter = "" if requests[0].adapter is None else requests[0].adapter.name  # empty: the base model
        self._requests = len(requests)
        self._n = requests[0].n
        self._live = [True] * (self._requests * self._n)
        self._open = len(self._live)
        self._mailbox: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._nudged = False
        self._unaccepted = self._requests
        self._error: TandemError | None = None
        self.started: float | None = None  # when its first row was planned, in seconds of the monotonic clock
        self.first_token_at = 0.0  # when the engine reported the first tokens, by the monotonic clock; 0: not yet
        self.last_token_at = 0.0  # when the engine reported the newest tokens
        self.preemptions = 0  # how often a sequence of it was preempted

    def index(self, delta: Delta) -> int:
        """Return the number of a delta's choice over all requests."""
        return (delta.request - self.first) * self._n + delta.choice

    # -- the client's side --------------------------------------------------------------------------------------

    def push(self, delta: Delta, at: float) -> None:
        """Add a delta and wake the reader. A delta of a choice that has ended is dropped.

        `at` is when the engine reported it, in seconds of the monotonic clock.
        """
        if delta.finish is not None:
            index = self.index(delta)
            if not self._live[index]:
                return
            self._end(index)
        elif not self._live[self.index(delta)]:
            return
        self._mailbox.append(delta)
        self.first_token_at = self.first_token_at or at
        self.last_token_at = at
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    def accept(self) -> None:
        """Note that the engine has accepted one of the requests."""
        self._unaccepted -= 1
        if not self._unaccepted:
            self._wake()

    def fail(self, error: TandemError, request: int | None = None) -> None:
        """End the stream with an error: a submission fails as a whole.

        The engine has already ended `request`; None: all requests. Requests that still run are cancelled.
        """
        if request is not None:
            first = (request - self.first) * self._n
            self._live[first : first + self._n] = [False] * self._n
        self.cancel()
        self._error = error
        self._wake()

    # -- the reader's side --------------------------------------------------------------------------------------

    async def accepted(self) -> None:
        """Wait until the engine has accepted all requests, or somebody nudges the reader.

        Raises the error by which the engine refuses a request.
        """
        while self._unaccepted and not self._mailbox:
            if self._error is not None:
                raise self._error
            if self._nudged or not self._open:
                break
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._nudged = False

    def nudge(self) -> None:
        """Hand an empty list to the reader if it waits for deltas."""
        if self._waiter is not None:
            self._nudged = True
            self._wake()

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self

    async def __anext__(self) -> list[Delta]:
        while not self._mailbox:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            if self._nudged:
                self._nudged = False
                break
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        deltas = self._mailbox
        self._mailbox = []
        return deltas

    def cancel(self, choice: int | None = None) -> None:
        """Cancel a choice, or all of them; their later deltas are dropped."""
        if choice is None:
            for k in range(self._requests):
                if any(self._live[k * self._n : (k + 1) * self._n]):
                    self._owner.cancel(self.first + k)
            self._live = [False] * len(self._live)
            self._open = 0
            self._wake()
        elif self._live[choice]:
            k = choice // self._n
            if sum(self._live[k * self._n : (k + 1) * self._n]) > 1:
                self._owner.cancel(self.first + k, choice % self._n)
            else:
                self._owner.cancel(self.first + k)
            self._end(choice)
            if not self._open:
                self._wake()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.cancel()

    def _end(self, index: int) -> None:
        """Note that a choice has ended, and forget its request when no choice of it is left."""
        self._live[index] = False
        self._open -= 1
        k = index // self._n
        if not any(self._live[k * self._n : (k + 1) * self._n]):
            self._owner.forget(self.first + k)

    def _wake(self) -> None:
        """Let the reader go on if it waits."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
