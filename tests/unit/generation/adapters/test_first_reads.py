"""A folder is read once for all requests that wait for it, whichever of them leave or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mlx_tandem.errors import ModelError, Timeout
from mlx_tandem.generation.adapters.first_reads import FirstReads


class Reads:
    """A reading that ends when the test says so."""

    def __init__(self) -> None:
        self.count = 0
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __call__(self) -> None:
        self.count += 1
        await self.end


def run(test: Callable[[FirstReads, Reads], Awaitable[None]], seconds: float = 0.0) -> None:
    async def main() -> None:
        reads, reader = FirstReads(seconds), Reads()
        await test(reads, reader)
        for _ in range(3):
            await asyncio.sleep(0)
        assert "a" not in reads, "what was read is read no longer"
        again = Reads()
        again.end.set_result(None)
        await reads.wait("a", again)
        assert again.count == 1, "and a later request reads again"

    asyncio.run(main())


async def begun(reads: FirstReads, read: Reads, waiting: int) -> list[asyncio.Task[None]]:
    tasks = [asyncio.create_task(reads.wait("a", read)) for _ in range(waiting)]
    while not read.count:
        await asyncio.sleep(0)
    assert "a" in reads
    assert "b" not in reads
    return tasks


def test_all_wait_for_one_reading() -> None:
    async def test(reads: FirstReads, read: Reads) -> None:
        tasks = await begun(reads, read, 3)
        read.end.set_result(None)
        await asyncio.gather(*tasks)
        assert read.count == 1

    run(test)


def test_a_caller_who_leaves_leaves_the_others_their_reading() -> None:
    async def test(reads: FirstReads, read: Reads) -> None:
        first, second = await begun(reads, read, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert "a" in reads
        read.end.set_result(None)
        await second
        assert read.count == 1

    run(test)


def test_all_get_the_error() -> None:
    async def test(reads: FirstReads, read: Reads) -> None:
        tasks = await begun(reads, read, 2)
        read.end.set_exception(ModelError("it is broken"))
        for task in tasks:
            with pytest.raises(ModelError, match="it is broken"):
                await task

    run(test)


def test_a_wait_that_is_too_long_ends_and_the_reading_goes_on() -> None:
    async def test(reads: FirstReads, read: Reads) -> None:
        (task,) = await begun(reads, read, 1)
        with pytest.raises(Timeout, match=r"the adapter a could not be read within 0\.01 s") as late:
            await task
        assert late.value.code == "first_token_timeout"
        assert "a" in reads
        read.end.set_result(None)

    run(test, 0.01)


def test_other_names_are_read_beside_it() -> None:
    async def test(reads: FirstReads, read: Reads) -> None:
        (task,) = await begun(reads, read, 1)
        other = Reads()
        other.end.set_result(None)
        await reads.wait("b", other)
        assert (read.count, other.count) == (1, 1)
        read.end.set_result(None)
        await task

    run(test)
