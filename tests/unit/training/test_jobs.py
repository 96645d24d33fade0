"""Updates in their turn."""

from __future__ import annotations

import asyncio

import pytest

from mlx_tandem import limits
from mlx_tandem.errors import Conflict, EngineUnavailable, NotFound, Overloaded
from mlx_tandem.training.live.jobs import REMEMBERED, Jobs


def test_one_at_a_time_in_order() -> None:
    async def run() -> None:
        jobs, said = Jobs(lambda: 7.0), []
        first_may_end = asyncio.Event()

        async def work(name: str) -> str:
            said.append(f"{name} begins")
            if name == "a":
                await first_may_end.wait()
            said.append(f"{name} ends")
            return name

        a, b = jobs.start(lambda: work("a")), jobs.start(lambda: work("b"))
        await asyncio.sleep(0)
        assert (a.status, b.status) == ("running", "queued")
        first_may_end.set()
        await jobs.wait(b)
        assert said == ["a begins", "a ends", "b begins", "b ends"]
        assert jobs.get(b.id).describe() == {
            "id": b.id,
            "object": "training.job",
            "created": 7,
            "status": "succeeded",
            "report": "b",
            "error": None,
        }

    asyncio.run(run())


@pytest.mark.promise("I12")
def test_what_fails_says_why_and_the_next_one_runs() -> None:
    async def run() -> None:
        jobs = Jobs(lambda: 0.0)

        async def refuses() -> None:
            raise Conflict("no")

        async def breaks() -> None:
            raise RuntimeError("a secret")

        async def works() -> int:
            return 1

        first, second, third = jobs.start(refuses), jobs.start(breaks), jobs.start(works)
        with pytest.raises(Conflict):
            await jobs.wait(first)
        await jobs.wait(third)
        assert first.describe()["error"] == {"message": "no", "code": "conflict"}
        assert second.status == "failed" and "secret" not in str(second.describe())
        assert third.report == 1

    asyncio.run(run())


def test_a_caller_who_leaves_does_not_end_it() -> None:
    async def run() -> None:
        jobs, go = Jobs(lambda: 0.0), asyncio.Event()
        job = jobs.start(go.wait)
        waiting = asyncio.create_task(jobs.wait(job))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        go.set()
        await jobs.wait(job)
        assert job.status == "succeeded"

    asyncio.run(run())


@pytest.mark.promise("I12")
def test_few_may_wait_and_few_are_remembered() -> None:
    async def run() -> None:
        jobs, never = Jobs(lambda: 0.0), asyncio.Event()
        waiting = [jobs.start(never.wait) for _ in range(1 + limits.MAX_TRAINING_JOBS)]
        caller = asyncio.create_task(jobs.wait(waiting[-1]))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            jobs.start(never.wait)
        await jobs.close()
        assert all(job.status == "failed" for job in waiting)
        with pytest.raises(EngineUnavailable):
            await caller

        jobs, done = Jobs(lambda: 0.0), asyncio.Event()
        done.set()
        first = jobs.start(done.wait)
        for _ in range(REMEMBERED):
            await jobs.wait(jobs.start(done.wait))
        with pytest.raises(NotFound):
            jobs.get(first.id)

    asyncio.run(run())
