"""The requests of one model in the order of their sequence numbers, whatever the order in which they arrive."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, NotFound, Overloaded, TandemError
from mlx_tandem.log import log_exception
from mlx_tandem.training.tinker.promises import Promise, Promises, Result

Work = Callable[[], Awaitable[Result]]
"""The work of a request."""

REMEMBERED = 2 * limits.MAX_TINKER_AHEAD
"""Number of the last requests of a model that are recognised when they are sent again; all that wait are among them."""


class _Job:
    """A request that waits for its turn, with the bytes of its data."""

    def __init__(self, promise: Promise, work: Work, size: int):
        self.promise = promise
        self.work = work
        self.size = size


class Order:
    """The queue of one model. Its requests are numbered from 1 on and done one after the other, in this order.

    A request that comes again with the same number and content, as clients send it when a connection is lost, has the
    promise that it had before. Another request with a number that was used is refused.
    """

    def __init__(self, promises: Promises, owner: str, session: str):
        """Begin with number 1. The promises of `session` belong to `owner`."""
        self._promises = promises
        self._owner = owner
        self._session = session
        self._next = 1
        self._waiting: dict[int, _Job] = {}
        self._bytes = 0
        self._seen: OrderedDict[int, tuple[bytes, Promise]] = OrderedDict()
        self._refused: dict[int, TandemError] = {}  # why requests among these were refused
        self._first: list[_Job] = []  # work without a number that goes before all others
        self._last: list[_Job] = []  # work without a number that goes behind all others that can be done
        self._runner: asyncio.Task[None] | None = None
        self._is_closed = False

    def begin(self, work: Work) -> Promise:
        """Add work without a number that is done before everything else, and return its promise."""
        return self._unnumbered(self._first, work)

    def last(self, work: Work) -> Promise:
        """Add work without a number that is done after what can be done so far, and return its promise."""
        return self._unnumbered(self._last, work)

    def _unnumbered(self, queue: list[_Job], work: Work) -> Promise:
        job = _Job(self._promises.new(self._owner, self._session), work, 0)
        queue.append(job)
        self._run()
        return job.promise

    def repeated(self, number: int, content: bytes) -> Promise | None:
        """Return the promise of a request that has come before; None if it is new.

        `content` is a digest of the request. Raises InvalidRequest for a number that another request has used, or that
        is too far ahead, Overloaded if too much waits, and the error by which this very request was refused.
        """
        seen = self._seen.get(number)
        if seen is not None:
            if seen[0] == content:
                if number in self._refused:
                    raise self._refused[number]
                return seen[1]
            raise InvalidRequest(f"seq_id {number} was used by another request", param="seq_id")
        if number < self._next:
            raise InvalidRequest(f"seq_id {number} was used before; the next is {self._next}", param="seq_id")
        if number >= self._next + limits.MAX_TINKER_AHEAD:
            raise InvalidRequest(
                f"seq_id {number} is too far ahead: {self._next} is next, and {limits.MAX_TINKER_AHEAD} may wait",
                param="seq_id",
            )
        if self._bytes > limits.MAX_TINKER_WAITING and number != self._next:
            raise Overloaded("as many requests of this model wait as the server takes", retry_after=1.0)
        return None

    def add(self, number: int, content: bytes, work: Work, size: int = 0) -> Promise:
        """Add a new request and return its promise. `size` is the bytes of its data. Raises what `repeated` raises."""
        if (known := self.repeated(number, content)) is not None:
            return known
        promise = self._promises.new(self._owner, self._session)
        self._waiting[number] = _Job(promise, work, size)
        self._bytes += size
        self._seen[number] = (content, promise)
        while len(self._seen) > REMEMBERED:
            self._refused.pop(self._seen.popitem(last=False)[0], None)
        self._run()
        return promise

    def refuse(self, number: int, content: bytes, error: TandemError, then: Callable[[], None]) -> None:
        """Use up the number of a request that is refused with `error`, so that those after it do not wait for it.

        `then` runs when it would have been its turn. A number that cannot be used is left alone.
        """

        async def fail() -> Result:
            then()
            raise error

        try:
            if self.repeated(number, content) is None:
                self.add(number, content, fail)
                self._refused[number] = error
        except TandemError:
            pass

    def close(self) -> None:
        """End the queue, from one of its own jobs, too. What waits is not done any more, and fails."""
        self._is_closed = True
        error = NotFound("the model is gone", param="model_id")
        for job in (*self._first, *self._waiting.values(), *self._last):
            self._promises.settle(job.promise, error)
        self._waiting.clear()
        self._first.clear()
        self._last.clear()
        if self._runner is not None and self._runner is not asyncio.current_task():
            self._runner.cancel()

    def _take(self) -> _Job | None:
        """Return the job that is next, if it is there."""
        if self._first:
            return self._first.pop(0)
        job = self._waiting.pop(self._next, None)
        if job is not None:
            self._next += 1
            self._bytes -= job.size
            return job
        return self._last.pop(0) if self._last else None

    def _run(self) -> None:
        """Start to do what waits, unless that is under way."""
        if self._runner is None and not self._is_closed:
            self._runner = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Do one job after the other until the next one is missing."""
        try:
            while (job := self._take()) is not None:
                self._promises.settle(job.promise, await outcome_of(job.work))
        finally:
            self._runner = None


async def outcome_of(work: Work) -> Result | TandemError:
    """Return the result of `work`, or the error that it ended with. An unforeseen one is logged and tells nothing."""
    try:
        return await work()
    except TandemError as e:
        return e
    except Exception as e:
        log_exception("a request of Tinker's API failed", e)
        return TandemError("internal error")
