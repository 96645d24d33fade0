"""One process that learns online, out of fakes, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from mlx_tandem.config import Config
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.files import StorageError
from mlx_tandem.training.online.online import OnlineLearner
from mlx_tandem.training.store.database import Database, Statement
from tests.unit.learning_fakes import Client, Points, Server, group

TRAINER = "policy"


def on_a_loop(test: Callable[[Path], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        asyncio.run(test(tmp_path))

    return run


class Side:
    """One process: a learner, its engine and its server."""

    def __init__(self, config: Config, points: Points | None = None, answer: Callable[[float], str] = lambda _: "no"):
        self.points = points or Points()
        self.client = Client(self.points)
        self.server = Server(self.client, answer)
        self.learner = OnlineLearner(config, cast(EngineClient, self.client), self.server, clock=lambda: 5.0)
        self._threads = ThreadPoolExecutor(4)

    @property
    def trained(self) -> tuple[int, ...]:
        return self.client.trainers[TRAINER].trained

    @property
    def digest(self) -> str:
        return self.client.trainers[TRAINER].digest

    @property
    def version(self) -> int:
        ref = self.server.current()
        return 0 if ref is None else ref.version

    async def kill(self) -> None:
        """Nothing of what was not on the drive is left, and nothing writes there any more, though threads outlive the
        tasks that started them."""
        self._threads.shutdown(cancel_futures=True)
        loop, last = asyncio.get_running_loop(), ThreadPoolExecutor(4)
        loop.set_default_executor(last)
        ledger = self.learner._learner.ledger
        ledger.checkpoints.close()
        ledger.shared.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await self.learner.rewards.close()
        await asyncio.gather(*tasks, self.learner._loop.task or asyncio.sleep(0), return_exceptions=True)
        last.shutdown()
        loop.set_default_executor(ThreadPoolExecutor(4))  # of the next process

    async def bring_up(self) -> None:
        """To where it was."""
        asyncio.get_running_loop().set_default_executor(self._threads)
        await self.learner.bring_up()
        await self.until(lambda: not self.learner.status().recovering)

    async def until(self, done: Callable[[], bool]) -> None:
        """Let everything run until `done`, or until something has ended for good."""
        for _ in range(20_000):
            if done() or self.points.broken:
                return
            await asyncio.sleep(0.0001)
        raise AssertionError(f"nothing happens: {self.learner.status()}")


@contextlib.asynccontextmanager
async def running(
    config: Config, answer: Callable[[float], str] = lambda _: "no", *, start: bool = True
) -> AsyncIterator[Side]:
    side = Side(config, answer=answer)
    await side.bring_up()
    if start:
        side.learner.start()
    try:
        yield side
    finally:
        await side.learner.close()


@contextlib.contextmanager
def full_drive() -> Iterator[None]:
    """The drive takes nothing for the database."""

    def write(self: Database, statements: Sequence[Statement]) -> None:
        raise StorageError("database or disk is full")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "write", write)
        yield


async def feed(side: Side, numbers: Sequence[int], updates: int) -> None:
    for number in numbers:
        await side.learner.add(group(number), 2)
    await side.until(lambda: side.learner.status().updates >= updates)


def validated(folder: Path, count: int = 4) -> Path:
    path = folder / "validation.jsonl"
    lines = [
        {"prompt": f"p{i}", "scoring_function": "exact_match", "metadata": {"answer": "yes"}} for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
