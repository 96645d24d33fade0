"""Scores completions in worker processes, in batches, for callers on an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.process import Lost, Program, WorkerProcess
from mlx_tandem.limits import MAX_REWARD_BYTES
from mlx_tandem.training.rewards.messages import (
    KINDS,
    MAX_ANSWER,
    Failed,
    Item,
    Kind,
    Sample,
    Scored,
    Scoring,
    decode_answer,
)
from mlx_tandem.training.rewards.scoring import Catalogue

log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20  # a larger item is a batch by itself


class RewardPool:
    """The workers that score completions. Belongs to one event loop, and starts no process before the first score."""

    def __init__(self, config: RLTrainingConfig):
        """Prepare the workers. Raises InvalidRequest when the configuration's composites, or installed functions, are
        wrong.
        """
        self._config = config
        self._catalogue = Catalogue(config.rewards)
        limits = (str(config.reward_timeout_s), str(config.reward_memory_mb << 20))
        program = Program("mlx_tandem.training.rewards.worker", limits, decode_answer, MAX_ANSWER)
        self._workers = [WorkerProcess(program) for _ in range(config.reward_workers)]
        self._idle = self._workers.copy()
        self._free = asyncio.Semaphore(config.reward_workers)
        self._told: set[tuple[str, Failed]] = set()
        self.failures: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        """Items without a score so far, by reason."""

    @property
    def names(self) -> list[str]:
        """What `scoring_function` may be, sorted."""
        return self._catalogue.names

    def check(self, scoring: str | Mapping[str, Any] | Sequence[Any], metadata: Mapping[str, Any]) -> Scoring:
        """Return how completions are scored: by a name, an object of names and weights, or a list of {function, weight,
        options}.

        `metadata` has what the functions need. Raises InvalidRequest naming `scoring_function` or `metadata.<field>`.
        """
        return self._catalogue.check(scoring, metadata)

    async def score(self, scoring: Sequence[Scoring], samples: Sequence[Sample]) -> list[float | None]:
        """Return the reward of each sample by the scoring at its place; None, and counted, where there is none.

        Functions see the metadata of both; of two fields of one name they see the scoring's, which was checked.
        """
        items = [_encoded(s, sample) for s, sample in zip(scoring, samples, strict=True)]
        answers: list[Scored | Failed] = [i if isinstance(i, Failed) else Failed("died") for i in items]
        batches = list(_batches(items, self._config.scoring_batch_size))
        runs = [self._run([item for _, item in batch]) for batch in batches]
        for batch, done in zip(batches, await asyncio.gather(*runs), strict=True):
            for (i, _), answer in zip(batch, done, strict=True):
                answers[i] = answer
        for s, answer in zip(scoring, answers, strict=True):
            if isinstance(answer, Failed):
                self._count(s.function, answer)
        return [a.value if isinstance(a, Scored) else None for a in answers]

    async def close(self) -> None:
        """End the workers, whatever they do; scores that are under way come back as None."""
        for worker in self._workers:
            worker.close()
        for _ in self._workers:
            await self._free.acquire()
        for worker in self._workers:
            await worker.stop()
            self._free.release()

    async def _run(self, items: list[bytes]) -> list[Scored | Failed]:
        async with self._free:
            worker = self._idle.pop()
            try:
                answers = await worker.ask(items)
            finally:
                self._idle.append(worker)
        return [Failed(a.kind, "" if a.started else "no worker") if isinstance(a, Lost) else a for a in answers]

    def _count(self, function: str, failed: Failed) -> None:
        self.failures[failed.kind] += 1
        if (function, failed) not in self._told and len(self._told) < 1000:
            self._told.add((function, failed))
            log.warning("a completion has no reward of %s: %s %s", function, failed.kind, failed.detail)


def _encoded(scoring: Scoring, sample: Sample) -> bytes | Failed:
    sample = msgspec.structs.replace(sample, metadata=sample.metadata | scoring.metadata)
    try:
        item = encode(Item(scoring.parts, sample))
    except (TypeError, ValueError, OverflowError, RecursionError) as e:  # lone surrogates are ValueError too
        return Failed("invalid", type(e).__name__)
    return item if len(item) <= MAX_REWARD_BYTES else Failed("too_large")


def _batches(items: Sequence[bytes | Failed], most: int) -> Iterator[list[tuple[int, bytes]]]:
    """Items with their places, at most `most` and BATCH_BYTES together."""
    batch: list[tuple[int, bytes]] = []
    size = 0
    for i, item in enumerate(items):
        if isinstance(item, Failed):
            continue
        if batch and (len(batch) == most or size + len(item) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append((i, item))
        size += len(item)
    if batch:
        yield batch
