"""Completions of live traffic as trajectories: what a request asks of learning, and what becomes of its choices."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answer
from mlx_tandem.log import log
from mlx_tandem.training.trajectories import Trajectory, new_id
from mlx_tandem.types import SamplingParams

if TYPE_CHECKING:
    from mlx_tandem.training.live.learning import Learning
    from mlx_tandem.training.rewards import Scoring

Outcome = dict[str, Any]
"""What a choice says of itself once it is scored: `trajectory_id` and `score`, each only when asked for, and `dropped`
when it was to be collected and is not."""

Reason = Literal["stale", "no_score", "empty", "storage_error"]
"""Why a choice is not collected. stale: it is too many versions away; empty: it has no token; storage_error: the
journal cannot be written."""


@dataclass(frozen=True)
class Collect:
    """A request to learning. At least one of `keep` and `shown` is set."""

    keep: bool  # its choices become trajectories
    shown: bool  # its reply waits for the scores
    scoring: Scoring
    metadata: dict[str, Any]
    groups: tuple[str, ...]  # of each prompt's choices
    shared: bool  # others may join these groups
    prompts: tuple[str, ...]  # as text, for the reward functions
    params: SamplingParams


class Recorder:
    """Has the choices of one request scored and collected once all have ended."""

    def __init__(self, learning: Learning, collect: Collect, prompts: Sequence[Sequence[int]], n: int):
        self._learning = learning
        self._collect = collect
        self._prompts = prompts
        self._n = n

    async def record(self, said: Sequence[Answer]) -> list[Outcome]:
        """Return what is to be shown of each choice, which has ended. With `shown` this waits for the scores, and a
        trajectory that is named then is on disk."""
        collect, learner = self._collect, self._learning.learner
        if collect.keep:
            for prompt, text in zip(self._prompts, collect.prompts, strict=True):
                learner.record_prompt(tuple(prompt), collect.scoring, collect.params, text)
        ids = [new_id() for _ in said]
        if not collect.shown:
            # What has no score is dropped later, when the reply is gone.
            gone = {id: self._doomed(answer) for id, answer in zip(ids, said, strict=True)}
            await self._learning.later(self._settle(ids, said))
            return [_collected(id, gone[id]) for id in ids]
        scores, dropped = await self._settle(ids, said)
        return [
            (_collected(id, dropped.get(id)) if collect.keep else {}) | {"score": score}
            for id, score in zip(ids, scores, strict=True)
        ]

    def _doomed(self, said: Answer) -> Reason | None:
        """Return why a choice will not be collected whatever its score is."""
        if not said.tokens:
            return "empty"
        return "stale" if self._learning.learner.is_stale(said.versions) else None

    async def _settle(self, ids: Sequence[str], said: Sequence[Answer]) -> tuple[list[float | None], dict[str, Reason]]:
        """Score the choices and collect them; return the scores, and why some are not collected, by id."""
        from mlx_tandem.training.rewards import Sample

        collect, learner = self._collect, self._learning.learner
        samples = [
            Sample(collect.prompts[i // self._n], answer.text, collect.metadata, len(answer.tokens))
            for i, answer in enumerate(said)
        ]
        scores = await learner.rewards.score([collect.scoring] * len(samples), samples)
        dropped: dict[str, Reason] = {}
        if not collect.keep:
            return scores, dropped
        now = self._learning.clock()
        scored: dict[str, list[Trajectory]] = {group: [] for group in collect.groups}
        for i, (id, score) in enumerate(zip(ids, scores, strict=True)):
            if not said[i].tokens:
                dropped[id] = "empty"
            elif score is None:
                dropped[id] = "no_score"
            else:
                scored[collect.groups[i // self._n]].append(self._trajectory(i, said[i], id, score, now))
        try:
            stale = await asyncio.gather(
                *(learner.add(group, 0 if collect.shared else len(group)) for group in scored.values() if group)
            )
        except TandemError as e:  # serving goes on without a journal
            log("trajectories not collected", error=e.message)
            return scores, dropped | {t.id: "storage_error" for group in scored.values() for t in group}
        return scores, dropped | dict.fromkeys(frozenset[str]().union(*stale), "stale")

    def _trajectory(self, index: int, own: Answer, id: str, score: float, created: float) -> Trajectory:
        collect = self._collect
        return Trajectory(
            id=id,
            group=collect.groups[index // self._n],
            prompt=tuple(self._prompts[index // self._n]),
            tokens=tuple(own.tokens),
            logprobs=tuple(lp.sampled for lp in own.logprobs),
            model_logprobs=tuple(lp.model for lp in own.logprobs),
            versions=tuple(own.versions),
            temperature=collect.params.temperature,
            reward=score,
            created=created,
            metadata=collect.metadata,
        )


def _collected(id: str, dropped: Reason | None) -> Outcome:
    return {"trajectory_id": id} if dropped is None else {"trajectory_id": None, "dropped": dropped}
