"""Scores completions for callers on an event loop: by functions in worker processes, and by reward models."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.errors import TandemError
from mlx_tandem.isolation.frames import encode
from mlx_tandem.isolation.process import Lost, Program, WorkerProcess
from mlx_tandem.limits import MAX_REWARD_BYTES, PARAMETERS
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
from mlx_tandem.training.rewards.models import RewardModels
from mlx_tandem.training.rewards.scoring import Catalogue

log = logging.getLogger(__name__)

REWARD = PARAMETERS["reward"]

BATCH_BYTES = 4 << 20  # a larger item is a batch by itself


class RewardPool:
    """The workers that score completions. Belongs to one event loop, and starts no process before the first score."""

    def __init__(self, config: RLTrainingConfig, models: RewardModels | None = None):
        """Prepare the workers. `models` are the reward models that can be asked; None: there are none.

        Raises InvalidRequest when the configuration's composites, or installed functions, are wrong.
        """
        self._config = config
        self._models = models
        self._catalogue = Catalogue(config.rewards, models)
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
        computed, judged = await asyncio.gather(self._computed(scoring, samples), self._judged(scoring, samples))
        answers = [_sum(own, theirs) for own, theirs in zip(computed, judged, strict=True)]
        for s, answer in zip(scoring, answers, strict=True):
            if isinstance(answer, Failed):
                self._count(s.function, answer)
        return [a.value if isinstance(a, Scored) else None for a in answers]

    async def _computed(self, scoring: Sequence[Scoring], samples: Sequence[Sample]) -> list[Scored | Failed]:
        """Return what the functions among the parts give each sample; 0 where there are none."""
        asked = [i for i, s in enumerate(scoring) if s.computed]
        items = [_encoded(scoring[i], samples[i]) for i in asked]
        found: list[Scored | Failed] = [i if isinstance(i, Failed) else Failed("died") for i in items]
        batches = list(_batches(items, self._config.scoring_batch_size))
        runs = [self._run([item for _, item in batch]) for batch in batches]
        for batch, done in zip(batches, await asyncio.gather(*runs), strict=True):
            for (i, _), answer in zip(batch, done, strict=True):
                found[i] = answer
        answers: list[Scored | Failed] = [Scored(0.0)] * len(samples)
        for i, answer in zip(asked, found, strict=True):
            answers[i] = answer
        return answers

    async def _judged(self, scoring: Sequence[Scoring], samples: Sequence[Sample]) -> list[Scored | Failed]:
        """Return what the reward models among the parts give each sample; 0 where there are none."""
        asked: dict[str, list[tuple[int, float]]] = {}  # samples and weights by model
        for i, s in enumerate(scoring):
            for part in s.judged:
                asked.setdefault(part.options["model"], []).append((i, part.weight))
        answers: list[Scored | Failed] = [Scored(0.0)] * len(samples)
        runs = [self._asked(model, [samples[i] for i, _ in places]) for model, places in asked.items()]
        for places, scores in zip(asked.values(), await asyncio.gather(*runs), strict=True):
            for (i, weight), score in zip(places, scores, strict=True):
                answers[i] = _sum(answers[i], Scored(weight * score) if isinstance(score, float) else score)
        return answers

    async def _asked(self, model: str, samples: Sequence[Sample]) -> Sequence[float | Failed]:
        """Return the scores of a reward model."""
        assert self._models is not None  # `check` lets nothing else through
        try:
            return await self._models.scores(model, [sample.sequence for sample in samples])
        except TandemError as e:
            return [Failed("model", type(e).__name__)] * len(samples)

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


def _sum(one: Scored | Failed, other: Scored | Failed) -> Scored | Failed:
    """Return the sum of two parts of a reward, a failure of one of them, or that the sum is out of range."""
    if isinstance(one, Failed) or isinstance(other, Failed):
        return one if isinstance(one, Failed) else other
    value = one.value + other.value
    if REWARD.low <= value <= REWARD.high:  # NaN is nowhere
        return Scored(value)
    return Failed("invalid", "out of range" if math.isfinite(value) else "not finite")


def _encoded(scoring: Scoring, sample: Sample) -> bytes | Failed:
    sample = msgspec.structs.replace(sample, metadata=sample.metadata | scoring.metadata, sequence=())
    try:
        item = encode(Item(scoring.computed, sample))
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
