"""Results that are kept within limits, and requests that are done in order, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from mlx_tandem import limits
from mlx_tandem.errors import InvalidRequest, NotFound, Overloaded, TandemError
from mlx_tandem.training.tinker.order import Order
from mlx_tandem.training.tinker.promises import Gone, Promise, Promises, Result
from mlx_tandem.training.tinker.samplers import CLONE, REMEMBERED, REMEMBERING, Base, Memory, Sampler


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(test())

    return run


def settled(promises: Promises, size: int = 10, session: str = "s") -> Promise:
    promise = promises.new("me", session)
    promises.settle(promise, Result(bytes(size)))
    return promise


def test_results_that_were_fetched_go_first() -> None:
    promises = Promises(most=3)
    first, second, third = (settled(promises) for _ in range(3))
    promises.fetched(second)
    fourth = settled(promises)
    assert [promises.get(own.id, "me") for own in (first, third, fourth)] == [first, third, fourth]
    with pytest.raises(Gone) as gone:
        promises.get(second.id, "me")
    assert gone.value.status == 410
    assert second.size == 0  # whoever holds the promise holds no result
    settled(promises)
    with pytest.raises(Gone):
        promises.get(first.id, "me")


@on_a_loop
async def test_whoever_holds_a_promise_holds_no_work() -> None:
    """Otherwise the result of a sample would stay in memory behind those that are kept within limits."""

    async def work() -> Result | TandemError:
        return Result(bytes(10))

    promises = Promises()
    promise = promises.new("me", "s")
    promise.task = asyncio.create_task(work())
    promises.settle(promise, await promise.task)
    assert promise.size == 10 and promise.task is None


def test_a_sampler_remembers_no_more_for_more_clients() -> None:
    """A client chooses its number among those that share a sampler."""
    sampler, promises = Sampler("s:sample:0", "base", Base()), Promises()
    for i in range(2 * REMEMBERED):
        promise = settled(promises)
        sampler.note(i * CLONE, b"", promise)
        sampler.done(i * CLONE, promise)
    assert len(sampler._done) == len(sampler._seen) == REMEMBERED
    last = 2 * REMEMBERED - 1
    (found,) = asyncio.run(sampler.completions(last, 0, 0))
    assert found.request == promise.id and sampler.repeated(last * CLONE, b"") is promise
    assert asyncio.run(sampler.completions(last, found.number, 0)) == []
    assert len(asyncio.run(sampler.completions(last - 1, 0, 0))) == 1
    sampler.forget()
    assert sampler.repeated(last * CLONE, b"") is None
    assert asyncio.run(sampler.completions(last - 1, 0, 0)) == []


def test_of_many_samplers_those_that_were_asked_last_remember() -> None:
    memory, promise = Memory(), settled(Promises())
    samplers = [Sampler(f"s:sample:{i}", "base", Base()) for i in range(REMEMBERING + 1)]
    for sampler in samplers[:-1]:
        memory.note(sampler, 0, b"", promise)
    memory.note(samplers[0], 1, b"", promise)
    memory.note(samplers[-1], 0, b"", promise)
    assert [sampler.repeated(0, b"") for sampler in samplers[:3]] == [promise, None, promise]


def test_results_have_a_limit_in_bytes() -> None:
    promises = Promises(most_bytes=100)
    first = settled(promises, 60)
    second = settled(promises, 60)
    assert first.size == 0 and promises.get(second.id, "me").size == 60
    large = settled(promises, 1000)  # the newest is kept, whatever its size
    assert promises.get(large.id, "me").size == 1000 and second.size == 0


def test_a_result_belongs_to_its_owner() -> None:
    promises = Promises()
    promise = settled(promises)
    with pytest.raises(NotFound):
        promises.get(promise.id, "other")
    promises.forget([promise.id], "other")
    assert promises.get(promise.id, "me") is promise
    promises.forget([promise.id], "me")
    with pytest.raises(NotFound):
        promises.get(promise.id, "me")


def test_too_many_that_wait_are_too_many() -> None:
    promises = Promises(most=2)
    for _ in range(2):
        promises.new("me", "s")
    with pytest.raises(Overloaded):
        promises.new("me", "s")


@on_a_loop
async def test_who_waits_hears_of_the_end_of_the_session() -> None:
    promises = Promises()
    waits, kept = promises.new("me", "s"), settled(promises, session="t")
    done = settled(promises)
    waiting = asyncio.create_task(waits.wait(60))
    await asyncio.sleep(0)
    promises.end("s")
    assert await waiting and isinstance(waits.outcome, NotFound)
    for gone in (waits, done):
        with pytest.raises(NotFound):
            promises.get(gone.id, "me")
    assert promises.get(kept.id, "me") is kept


def works(log: list[str], name: str) -> Callable[[], Awaitable[Result]]:
    async def work() -> Result:
        await asyncio.sleep(0)
        log.append(name)
        return Result(name.encode())

    return work


@on_a_loop
async def test_numbers_decide_the_order() -> None:
    promises, log = Promises(), list[str]()
    order = Order(promises, "me", "s")
    last = order.last(works(log, "last"))
    for number in (3, 2):
        order.add(number, b"", works(log, str(number)))
    first = order.begin(works(log, "first"))
    assert await first.wait(60) and await last.wait(60)
    one = order.add(1, b"", works(log, "1"))
    four = order.add(4, b"", works(log, "4"))
    assert await four.wait(60)
    assert log == ["first", "last", "1", "2", "3", "4"]
    assert order.add(1, b"", works(log, "again")) is one
    with pytest.raises(InvalidRequest, match="used by another request"):
        order.add(1, b"other", works(log, "other"))


@on_a_loop
async def test_an_error_is_an_outcome_and_others_go_on() -> None:
    promises, log = Promises(), list[str]()
    order = Order(promises, "me", "s")

    async def fails() -> Result:
        raise NotFound("no")

    async def breaks() -> Result:
        raise ZeroDivisionError("a secret")

    failed, broken = order.add(1, b"", fails), order.add(2, b"", breaks)
    assert await order.add(3, b"", works(log, "3")).wait(60)
    assert isinstance(failed.outcome, NotFound)
    assert isinstance(broken.outcome, TandemError) and "secret" not in broken.outcome.message


@on_a_loop
async def test_a_refused_request_uses_its_number_up() -> None:
    promises, log = Promises(), list[str]()
    order = Order(promises, "me", "s")
    later = order.add(2, b"", works(log, "2"))
    error = InvalidRequest("wrong")
    order.refuse(1, b"x", error, lambda: log.append("refused"))
    assert await later.wait(60) and log == ["refused", "2"]
    with pytest.raises(InvalidRequest, match="wrong"):
        order.repeated(1, b"x")
    order.refuse(1, b"y", error, lambda: log.append("never"))
    order.refuse(10**9, b"y", error, lambda: log.append("never"))
    assert log == ["refused", "2"]


@on_a_loop
async def test_what_waits_for_a_missing_request_has_a_limit() -> None:
    promises, log = Promises(), list[str]()
    order = Order(promises, "me", "s")
    order.add(2, b"", works(log, "2"), limits.MAX_TINKER_WAITING + 1)
    with pytest.raises(Overloaded):
        order.add(3, b"", works(log, "3"), 1)
    with pytest.raises(InvalidRequest, match="too far ahead"):
        order.add(1 + limits.MAX_TINKER_AHEAD, b"", works(log, "far"))
    assert await order.add(1, b"", works(log, "1")).wait(60)
    assert await order.add(3, b"", works(log, "3"), 1).wait(60)
    assert log == ["1", "2", "3"]


@on_a_loop
async def test_what_waits_fails_when_the_model_goes() -> None:
    promises, log = Promises(), list[str]()
    order = Order(promises, "me", "s")
    waits = order.add(2, b"", works(log, "2"))

    async def unload() -> Result:
        order.close()
        return Result(b"unloaded")

    gone = order.last(unload)
    assert await gone.wait(60) and await waits.wait(60)
    assert gone.outcome == Result(b"unloaded") and isinstance(waits.outcome, NotFound)
    order.add(1, b"", works(log, "1"))
    await asyncio.sleep(0)
    assert log == []
