"""Updates that clients ask for. One runs at a time, and clients can ask for the state of the last ones."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from mlx_tandem import limits
from mlx_tandem.errors import EngineUnavailable, NotFound, Overloaded, TandemError
from mlx_tandem.log import log_exception

REMEMBERED = 256
"""Most jobs that clients can ask for; older ones are forgotten."""


@dataclass(eq=False)
class Job:
    """One update. `created` is in Unix seconds, and `report` is what the update returned."""

    id: str
    created: float
    task: asyncio.Task[None] | None = None
    status: Literal["queued", "running", "succeeded", "failed"] = "queued"
    report: Any = None
    error: TandemError | None = None

    def describe(self) -> dict[str, Any]:
        """Return the description of the job for clients."""
        error = None if self.error is None else {"message": self.error.message, "code": self.error.code}
        return {
            "id": self.id,
            "object": "training.job",
            "created": int(self.created),
            "status": self.status,
            "report": msgspec.to_builtins(self.report),
            "error": error,
        }


class Jobs:
    """The queue of updates, on one event loop."""

    def __init__(self, clock: Callable[[], float]):
        """Begin without jobs. `clock` returns the time in Unix seconds."""
        self._clock = clock
        self._turn = asyncio.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, work: Callable[[], Awaitable[Any]]) -> Job:
        """Queue `work` behind the earlier jobs and return its job. Raises Overloaded when too many wait already."""
        open_jobs = sum(j.status in ("queued", "running") for j in self._jobs.values())
        if open_jobs > limits.MAX_TRAINING_JOBS:
            raise Overloaded(f"{limits.MAX_TRAINING_JOBS} updates wait already", retry_after=5.0)
        job = Job(f"job-{secrets.token_hex(12)}", self._clock())
        self._jobs[job.id] = job
        while len(self._jobs) > REMEMBERED:
            self._jobs.popitem(last=False)
        job.task = asyncio.create_task(self._run(job, work))
        return job

    async def wait(self, job: Job) -> None:
        """Wait until the job has ended, and raise its error if it failed. Cancelling the call does not end the job."""
        assert job.task is not None
        await asyncio.wait({job.task})
        if job.error is not None:
            raise job.error

    def __contains__(self, id: str) -> bool:
        """Return whether there is a job with this id."""
        return id in self._jobs

    def get(self, id: str) -> Job:
        """Return the job with this id. Raises NotFound."""
        try:
            return self._jobs[id]
        except KeyError:
            raise NotFound(f"there is no job {id[:64]!a}", param="id", code="job_not_found") from None

    async def close(self) -> None:
        """Cancel the jobs that have not ended. They fail with EngineUnavailable."""
        tasks = []
        for job in self._jobs.values():
            if job.task is not None and job.status in ("queued", "running"):
                job.status, job.error = "failed", EngineUnavailable("the server is shutting down")
                job.task.cancel()
                tasks.append(job.task)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, work: Callable[[], Awaitable[Any]]) -> None:
        """Run `work` when its turn has come, and record the result or the error in `job`."""
        try:
            async with self._turn:
                job.status = "running"
                job.report = await work()
            job.status = "succeeded"
        except TandemError as e:
            job.status, job.error = "failed", e
        except Exception as e:
            log_exception("an update failed", e, job=job.id)
            job.status, job.error = "failed", TandemError("internal error; the log has more under the job's id")
