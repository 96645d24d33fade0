"""The queue in front of worker processes, with workers that answer when a test lets them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import Overloaded
from mlx_tandem.isolation import pool as module
from mlx_tandem.isolation.pool import MOST_AT_ONCE, MOST_BYTES_AT_ONCE, SHARE_OF_NEWEST, Bounds, WorkerPool

ROOMY = Bounds(items=1000, bytes=1 << 30, seconds=3600.0)


class Worker:
    """A worker that answers an item with the item itself, one for each `go`."""

    def __init__(self, number: int, frames: list[tuple[int, list[bytes]]]):
        self._number, self._frames = number, frames
        self._may = asyncio.Semaphore(0)

    async def ask(self, items: Sequence[bytes], answered: Callable[[Any], None]) -> list[Any]:
        self._frames.append((self._number, list(items)))
        for item in items:
            await self._may.acquire()
            answered(item)
        return list(items)

    def go(self, items: int = 1) -> None:
        for _ in range(items):
            self._may.release()

    def close(self) -> None:
        self.go(1000)

    async def stop(self) -> int:
        return 0


def with_pool(use: Callable[..., Awaitable[None]], workers: int = 1, bounds: Bounds = ROOMY) -> None:
    """Call `use` with a pool, its workers, and the list of the frames that these get, each with the worker's number."""

    async def run() -> None:
        frames: list[tuple[int, list[bytes]]] = []
        pool: WorkerPool[Any] = WorkerPool("tests", None, workers, bounds)  # type: ignore[arg-type]
        made = [Worker(n, frames) for n in range(workers)]
        pool._workers[:] = pool._idle[:] = made  # type: ignore[assignment]
        try:
            await use(pool, made, frames)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 60))


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


def asks(pool: WorkerPool[Any], items: Sequence[bytes]) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(pool.ask(item)) for item in items]


SIZES = st.one_of(st.integers(1, 50), st.sampled_from([MOST_BYTES_AT_ONCE // 2, MOST_BYTES_AT_ONCE + 1]))


@settings(max_examples=40)
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=20), st.integers(1, 3))
def test_frames_are_full_and_in_order_without_those_who_left(items: list[tuple[int, bool]], workers: int) -> None:
    """An item that left while it waited takes no room in a frame. A frame is closed by the number or the bytes of its
    items, and only the items that wait for it."""

    async def use(pool: WorkerPool[Any], made: list[Worker], frames: list[tuple[int, list[bytes]]]) -> None:
        first = asks(pool, [b"first"] * workers)
        await turns()
        assert frames == [(n, [b"first"]) for n in reversed(range(workers))], "the last worker is used first"
        sent = [n.to_bytes(2, "big").ljust(size + 2, b"x") for n, (size, _) in enumerate(items)]
        tasks = asks(pool, sent)
        await turns()
        for task, (_, leaves) in zip(tasks, items, strict=True):
            if leaves:
                task.cancel()
        await turns()
        del frames[:]
        made[0].go(1000)
        await turns()
        staying = [item for item, (_, leaves) in zip(sent, items, strict=True) if not leaves]
        assert [item for _, frame in frames for item in frame] == staying
        expected: list[list[bytes]] = []
        for item in staying:
            frame = expected[-1] if expected else []
            if frame and len(frame) < MOST_AT_ONCE and sum(map(len, frame)) + len(item) <= MOST_BYTES_AT_ONCE:
                frame.append(item)
            else:
                expected.append([item])
        assert [frame for _, frame in frames] == expected
        assert [task.result() for task in tasks if not task.cancelled()] == staying
        for worker in made:
            worker.go(1000)
        await asyncio.gather(*first)

    with_pool(use, workers)


def test_a_worker_that_has_just_worked_is_used_again() -> None:
    async def use(pool: WorkerPool[Any], made: list[Worker], frames: list[tuple[int, list[bytes]]]) -> None:
        for worker in made:
            worker.go(10)
        for n in range(4):
            await pool.ask(b"%d" % n)
        assert [number for number, _ in frames] == [2] * 4

    with_pool(use, 3)


@pytest.mark.parametrize("bounds", [Bounds(4, 1000, 3600.0), Bounds(100, 40, 3600.0)], ids=["items", "bytes"])
def test_exactly_what_the_bounds_say_is_let_in(bounds: Bounds) -> None:
    async def use(pool: WorkerPool[Any], made: list[Worker], frames: list[tuple[int, list[bytes]]]) -> None:
        for _ in range(3):
            tasks = asks(pool, [b"x" * 10] * 5)
            await turns()
            assert [task.done() for task in tasks] == [False] * 4 + [True]
            assert isinstance(tasks[4].exception(), Overloaded)
            tasks[3].cancel()
            await turns()
            more = asks(pool, [b"x" * 10] * 2)  # one place is free
            await turns()
            assert [task.done() for task in more] == [False, True]
            assert isinstance(more[1].exception(), Overloaded)
            made[0].go(5)
            await turns()
            made[0].go(0 if all(task.done() for task in (*tasks, *more)) else 5)
            await turns()
            assert all(task.done() for task in (*tasks, *more))
            made[0]._may = asyncio.Semaphore(0)

    with_pool(use, bounds=bounds)


def test_a_refusal_says_how_long_those_in_front_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item takes two seconds: a frame of four takes eight. Two workers are at those that wait."""
    now = [0.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])

    async def use(pool: WorkerPool[Any], made: list[Worker], frames: list[tuple[int, list[bytes]]]) -> None:
        tasks = asks(pool, [b"x"] * 8)
        await turns()
        assert [len(frame) for _, frame in frames] == [4, 4]
        now[0] = 8.0
        for worker in made:
            worker.go(4)
        await asyncio.gather(*tasks)
        waiting = asks(pool, [b"x"] * 8)
        await turns()
        with pytest.raises(Overloaded) as refused:
            await pool.ask(b"x")
        average = 2.0 * (1 - (1 - SHARE_OF_NEWEST) ** 2)
        assert refused.value.retry_after == pytest.approx(8 * average / 2)
        for worker in made:
            worker.go(4)
        await asyncio.gather(*waiting)

    with_pool(use, 2, Bounds(8, 1000, 3600.0))


def test_an_item_that_a_worker_has_reached_is_not_refused() -> None:
    """The three items are one frame. Those that the worker has not reached when their time is over are refused, and it
    answers them for nobody."""

    async def use(pool: WorkerPool[Any], made: list[Worker], frames: list[tuple[int, list[bytes]]]) -> None:
        tasks = asks(pool, [b"a", b"b", b"c"])
        await turns()
        assert len(frames) == 1
        made[0].go()
        await turns()
        with pytest.raises(Overloaded):
            await tasks[2]
        assert tasks[0].done() and not tasks[1].done()
        made[0].go(2)
        assert await tasks[1] == b"b"
        made[0].go()
        assert await pool.ask(b"d") == b"d"

    with_pool(use, bounds=Bounds(10, 1000, 0.02))
