"""Worker processes behind a bounded queue: what one of them does costs the item that it did it over, and no other."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_tandem.errors import EngineError, Overloaded
from mlx_tandem.isolation import process
from mlx_tandem.isolation.pool import Bounds, WorkerPool
from mlx_tandem.isolation.process import Lost, Program, WorkerProcess
from tests.fault.worker_program import Said, decode_answer

Pool = WorkerPool[Said]
BOUNDS = Bounds(items=100, bytes=1000, seconds=60.0)


def with_pool(
    folder: Path,
    use: Callable[[Pool], Awaitable[None]],
    *,
    workers: int = 1,
    bounds: Bounds = BOUNDS,
    silence: float = 60.0,
) -> None:
    async def run() -> None:
        program = Program("tests.fault.worker_program", (str(folder), str(silence)), decode_answer, 4096)
        pool = Pool("tests", program, workers, bounds)
        try:
            await use(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 120))


async def pid(pool: Pool) -> int:
    answer = await pool.ask(b"pid")
    assert isinstance(answer, Said)
    return int(answer.text)


def starts(folder: Path) -> int:
    return len(list(folder.glob("start-*")))


async def held(pool: Pool, fifo: Path) -> asyncio.Task[Said | Lost]:
    """A question that a worker is at until somebody reads from `fifo`."""
    os.mkfifo(fifo)
    task = asyncio.create_task(pool.ask(b"wait " + bytes(fifo)))
    await asyncio.sleep(0)
    return task


def test_one_process_answers_in_order_and_is_kept(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        answers = await asyncio.gather(*(pool.ask(b"echo %d" % i) for i in range(20)))
        assert answers == [Said(str(i)) for i in range(20)]
        assert await pid(pool) == await pid(pool)
        assert starts(tmp_path) == 1

    with_pool(tmp_path, use)


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        ("spin", "timeout"),
        ("sleep", "timeout"),
        ("alarm", "timeout"),
        ("hoard", "memory"),
        ("die", "died"),
        ("much", "died"),
    ],
)
def test_an_item_loses_its_own_answer_only(tmp_path: Path, item: str, kind: str) -> None:
    async def use(pool: Pool) -> None:
        words = ["echo a", item, "echo b", item, "echo c"]
        answers = await asyncio.gather(*(pool.ask(w.encode()) for w in words))
        assert answers == [Said("a"), Lost(kind), Said("b"), Lost(kind), Said("c")]

    with_pool(tmp_path, use, silence=1.0)


def test_a_worker_has_the_time_of_a_start_each_time_it_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silence that the last one was allowed does not count."""

    async def use(pool: Pool) -> None:
        os.kill(await pid(pool), signal.SIGKILL)
        monkeypatch.setattr(process, "START_SECONDS", 0.001)
        with pytest.raises(EngineError, match="could not be started"):
            await pid(pool)
        monkeypatch.undo()
        await pid(pool)

    with_pool(tmp_path, use)


@pytest.mark.promise("FLT-07")
def test_who_was_killed_from_outside_is_started_again_and_asked_again(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        before = await pid(pool)
        os.kill(before, signal.SIGKILL)
        assert await pid(pool) != before
        assert starts(tmp_path) == 2

    with_pool(tmp_path, use)


def test_who_was_killed_before_the_first_item_is_started_again_for_it(tmp_path: Path) -> None:
    """A worker that was started again beside what waits has answered nothing yet when somebody kills it."""

    async def use(pool: Pool) -> None:
        assert await pool.ask(b"die") == Lost("died")
        while len(pool._idle) < 1 or pool._idle[-1]._child is None:
            await asyncio.sleep(0)
        child = pool._idle[-1]._child
        assert child is not None
        child.kill()
        child.wait()
        assert await pool.ask(b"echo x") == Said("x")

    with_pool(tmp_path, use)


def test_an_item_behind_others_of_a_new_worker_is_asked_again(tmp_path: Path) -> None:
    """One of those before it may have been the cause."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    readers: list[int] = []

    async def use() -> None:
        worker = WorkerProcess(Program("tests.fault.worker_program", (str(tmp_path), "60"), decode_answer, 4096))

        def answered(answer: Said | Lost) -> None:
            """Kill the worker at the first answer; from then on somebody reads what the second item writes."""
            if not readers:
                assert worker._child is not None
                worker._child.kill()
                worker._child.wait()
                readers.append(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))

        try:
            assert await worker.ask([b"echo x", b"wait " + bytes(fifo)], answered) == [Said("x"), Said(str(fifo))]
            assert starts(tmp_path) == 2
        finally:
            await worker.stop()

    asyncio.run(asyncio.wait_for(use(), 120))
    os.close(readers[0])


def test_a_lost_worker_is_started_before_the_next_item_comes(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        assert await pool.ask(b"spin") == Lost("timeout")
        while starts(tmp_path) < 2:
            await asyncio.sleep(0.01)
        await pid(pool)
        assert starts(tmp_path) == 2

    with_pool(tmp_path, use)


def test_others_are_answered_while_one_is_lost(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        fifo = tmp_path / "fifo"
        slow = await held(pool, fifo)
        lost = asyncio.gather(*(pool.ask(b"die") for _ in range(3)))
        assert await asyncio.gather(*(pool.ask(b"echo x") for _ in range(10))) == [Said("x")] * 10
        assert await lost == [Lost("died")] * 3
        assert await asyncio.to_thread(fifo.read_bytes) == b"x"
        assert await slow == Said(str(fifo))

    with_pool(tmp_path, use, workers=2)


@pytest.mark.parametrize("bounds", [Bounds(3, 1000, 60.0), Bounds(100, 80, 60.0)], ids=["items", "bytes"])
def test_what_is_over_the_bounds_is_refused(tmp_path: Path, bounds: Bounds) -> None:
    async def use(pool: Pool) -> None:
        answers = await asyncio.gather(*(pool.ask(b"echo " + b"x" * 20) for _ in range(10)), return_exceptions=True)
        assert answers[:3] == [Said("x" * 20)] * 3
        for refused in answers[3:]:
            assert isinstance(refused, Overloaded)
            assert refused.status == 429
            assert refused.retry_after is not None
        assert await pool.ask(b"echo again") == Said("again")
        assert await pool.ask(b"echo " + b"x" * 2000) == Said("x" * 2000)  # alone it may be as large as it likes

    with_pool(tmp_path, use, bounds=bounds)


def test_what_is_answered_or_refused_leaves_its_room_to_others(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        for round_ in range(6):
            task = await held(pool, fifo := tmp_path / f"fifo-{round_}")
            with pytest.raises(Overloaded):
                await pool.ask(b"echo " + b"x" * BOUNDS.bytes)
            waits = asyncio.create_task(pool.ask(b"echo " + b"x" * (BOUNDS.bytes // 3)))
            await asyncio.to_thread(fifo.read_bytes)
            assert all(isinstance(answer, Said) for answer in await asyncio.gather(task, waits))

    with_pool(tmp_path, use)


def test_who_was_answered_leaves_no_timer_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer would keep the item in memory until the longest wait is over."""

    async def use(pool: Pool) -> None:
        timers: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()
        later = loop.call_later

        def noted(seconds: float, *call: Any) -> asyncio.TimerHandle:
            timers.append(later(seconds, *call))
            return timers[-1]

        monkeypatch.setattr(loop, "call_later", noted)
        await asyncio.gather(*(pool.ask(b"pid") for _ in range(3)))
        monkeypatch.undo()
        assert len([t for t in timers if t.when() > loop.time() + BOUNDS.seconds / 2]) >= 3
        assert all(t.cancelled() for t in timers if t.when() > loop.time() + BOUNDS.seconds / 2)

    with_pool(tmp_path, use)


def test_what_waits_for_too_long_is_refused(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        await pid(pool)
        first = asyncio.create_task(pool.ask(b"sleep"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await pool.ask(b"pid")
        assert refused.value.status == 503
        assert await first == Lost("timeout")

    with_pool(tmp_path, use, bounds=Bounds(100, 1000, 0.05), silence=1.0)


def test_who_leaves_does_not_end_a_worker(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        before = await pid(pool)
        fifo = tmp_path / "fifo"
        working = await held(pool, fifo)
        waiting = asyncio.create_task(pool.ask(b"echo x"))
        await asyncio.sleep(0)
        for task in (working, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await asyncio.to_thread(fifo.read_bytes) == b"x"
        assert await pid(pool) == before

    with_pool(tmp_path, use)


def test_who_leaves_leaves_no_answer_to_the_next(tmp_path: Path) -> None:
    async def use() -> None:
        program = Program("tests.fault.worker_program", (str(tmp_path), "60"), decode_answer, 4096)
        worker = WorkerProcess(program)
        try:
            await worker.start()
            leaving = asyncio.create_task(worker.ask([b"echo x"]))
            await asyncio.sleep(0)  # until the item is sent
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            assert await worker.ask([b"echo y"]) == [Said("y")]
        finally:
            await worker.stop()

    asyncio.run(asyncio.wait_for(use(), 120))


def test_a_program_that_does_not_start_is_an_error_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "fail").touch()

    async def use(pool: Pool) -> None:
        with pytest.raises(EngineError, match="the process for tests could not be started"):
            await pool.ask(b"echo a")
        (tmp_path / "fail").unlink()
        assert await pool.ask(b"echo a") == Said("a")

    with_pool(tmp_path, use)


def test_closing_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    async def use(pool: Pool) -> None:
        child = await pid(pool)
        tasks = [await held(pool, tmp_path / "fifo"), asyncio.create_task(pool.ask(b"echo x"))]
        await asyncio.sleep(0)
        await pool.close()
        for task in tasks:
            with pytest.raises(EngineError):
                await task
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
        with pytest.raises(EngineError):
            await pool.ask(b"echo x")

    with_pool(tmp_path, use)


def test_a_forked_copy_of_a_worker_answers_nothing(tmp_path: Path) -> None:
    """It would answer the same item, and its answer would be taken for that of the next one."""

    async def use(pool: Pool) -> None:
        assert await pool.ask(b"fork") == Said("1")
        assert await pool.ask(b"echo a") == Said("a")

    with_pool(tmp_path, use)


def test_a_worker_that_crashes_leaves_no_core_file(tmp_path: Path) -> None:
    """A core file would hold prompts, and the process that starts workers may allow core files."""

    async def use(pool: Pool) -> None:
        assert await pool.ask(b"core") == Said("(0, 0)")

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with_pool(tmp_path, use)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
