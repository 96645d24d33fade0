"""Turning completions of live traffic into trajectories, as far as their requests ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from mlx_tandem.config import Config
from mlx_tandem.engine.learning import Truncation
from mlx_tandem.errors import TandemError
from mlx_tandem.generation.answers import Answer
from mlx_tandem.log import log
from mlx_tandem.training.draws import truncation
from mlx_tandem.training.open_trajectories import Beginning, Exchange
from mlx_tandem.training.trajectories import Trajectory, is_across, new_id
from mlx_tandem.types import AdapterRef, SamplingParams

if TYPE_CHECKING:
    from mlx_tandem.training.online.arms import Pair
    from mlx_tandem.training.online.prompts import Prompt
    from mlx_tandem.training.open_trajectories import OpenTrajectory
    from mlx_tandem.training.rewards import RewardPool, Scoring

Outcome = dict[str, Any]
"""The members that a reply adds to a choice for learning.

`trajectory_id` and `score` are there if the request asked for them. `dropped` has the reason why a choice that should
have been collected was not.
"""

Reason = Literal["stale", "no_score", "empty", "storage_error", "superseded"]
"""The reason why a choice is not collected.

stale: the versions that made it are too old. no_score: the reward function gave it no score. empty: it has no tokens.
storage_error: the database could not be written. superseded: another request has gone on with its trajectory meanwhile.
"""


class Later(Protocol):
    """Trajectories whose rewards come later."""

    def get(self, id: str) -> OpenTrajectory:
        """Return a trajectory without a reward. Raises NotFound and Conflict."""

    async def keep(self, answers: Sequence[tuple[str, Beginning | None, Exchange]]) -> None:
        """Keep answers until their rewards come. Raises TandemError."""

    async def reward(self, id: str, reward: float | None, turn_rewards: Sequence[float] = ()) -> bool:
        """Take a trajectory with its reward; return whether it is fresh enough to be learned from."""


class Learner(Protocol):
    """Whoever takes scored completions: the learner of this server, or the way to that of another machine."""

    @property
    def rewards(self) -> RewardPool:
        """The workers that score."""

    @property
    def later(self) -> Later | None:
        """The trajectories whose rewards come later; None where there are none."""

    def is_stale(self, versions: Sequence[int]) -> bool:
        """Return whether a completion by these versions is too old already."""

    async def add(self, trajectories: Sequence[Trajectory], size: int = 0) -> frozenset[str]:
        """Take scored completions; return the ids of those that are dropped since they are too old."""

    def choose(self, asked: AdapterRef) -> Pair | None:
        """Return the versions that answer a prompt which is collected; None: the one that was asked for."""

    def wait(self, prompt: Prompt, rewards: Sequence[float], n: int, pair: Pair) -> None:
        """Have a prompt answered by the pair's second version, too."""

    def record_prompt(
        self, prompt: tuple[int, ...], scoring: Scoring, params: SamplingParams, text: str = "", *, alone: bool = False
    ) -> None:
        """Keep a prompt that may be answered again to have more to compare with."""


class Collecting(Protocol):
    """A server's interface for collecting completions."""

    name: str
    """The name of the trained adapter."""

    config: Config
    """The settings of the trained adapter."""

    clock: Callable[[], float]

    @property
    def learner(self) -> Learner:
        """Whoever takes what is collected."""

    async def later(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start `work` in the background."""

    async def settled(self) -> None:
        """Wait until everything that `later` has started has ended."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens without control tokens."""

    def version_of(self, ref: AdapterRef | None) -> int | None:
        """Return the number of the trained adapter's version; 0 for the base, None for others."""


class Continued(NamedTuple):
    """The trajectory that a request goes on with, as it was when the request came."""

    id: str
    exchanges: int
    tokens: int
    temperature: float
    truncation: Truncation


class Talk(NamedTuple):
    """A prompt in its conversation."""

    messages: int  # before the answer; 0: it is no conversation that can be recognised
    rendered: bytes  # digest of the prompt as the chat template writes it
    continued: Continued | None = None


@dataclass(frozen=True)
class Collect:
    """A request's task for learning. At least one of `keep` and `shown` is set."""

    adapter: str  # whose learner takes the choices
    keep: bool  # the choices become trajectories
    shown: bool  # the reply waits for the scores and shows them
    scoring: Scoring
    metadata: dict[str, Any]
    groups: tuple[str, ...]  # the group of each prompt's choices
    shared: bool  # other requests may add to these groups
    prompts: tuple[str, ...]  # as text, for the reward functions
    params: SamplingParams
    later: bool = False  # the reward comes later: the choices are kept until then
    talk: Talk | None = None  # the conversation, where the prompt is one or goes on after a trajectory
    pair: Pair | None = None  # both versions that answer each prompt, where the request is part of the control arm

    @property
    def going(self) -> Continued | None:
        """The trajectory that the request goes on with, if there is one."""
        return None if self.talk is None else self.talk.continued

    @property
    def compared(self) -> bool:
        """Whether another version may answer, too: only where this answer alone is collected and scored here."""
        return self.keep and not self.later and self.going is None


class Recorder:
    """The recorder of one request, which scores and collects the choices once all have ended."""

    def __init__(
        self,
        learning: Collecting,
        collect: Collect,
        prompts: Sequence[Sequence[int]],
        n: int,
        scored: Callable[[Sequence[float | None]], Coroutine[Any, Any, None]] | None = None,
    ):
        """Prepare for a request with `n` choices of each of the `prompts`, which are token ids.

        `scored` is called in the background with the scores of the choices, if they get any here.
        """
        self._learning = learning
        self._scored = scored
        self._collect = collect
        self._prompts = prompts
        self._n = n

    async def record(self, said: Sequence[Answer]) -> list[Outcome]:
        """Score and collect the choices, which have ended; return the outcome of each for the reply.

        With `shown` this waits for the scores, and the named trajectories are on disk when it returns. Otherwise the
        scoring runs in the background.
        """
        collect, learner = self._collect, self._learning.learner
        if collect.compared:
            for prompt, text in zip(self._prompts, collect.prompts, strict=True):
                alone = self._n == 1 and not collect.shared
                learner.record_prompt(tuple(prompt), collect.scoring, collect.params, text, alone=alone)
        ids = [new_id() for _ in said]
        if collect.later or collect.going is not None:
            return await self._keep(ids, said)
        if not collect.shown:
            # A choice without a score is dropped later, when the reply has been sent already.
            gone = {id: self._doomed(answer) for id, answer in zip(ids, said, strict=True)}
            await self._learning.later(self._settle(ids, said))
            return [_collected(id, gone[id]) for id in ids]
        scores, dropped = await self._settle(ids, said)
        return [
            (_collected(id, dropped.get(id)) if collect.keep else {}) | {"score": score}
            for id, score in zip(ids, scores, strict=True)
        ]

    def _written(self, said: Answer) -> str:
        """Return all of a choice's text, with its thoughts and tool calls in the model's own form."""
        return self._learning.text_of(said.tokens) if said.thoughts or said.calls else said.text

    def _doomed(self, said: Answer) -> Reason | None:
        """Return the reason why a choice cannot be collected, whatever its score will be; None if it can."""
        if not said.tokens:
            return "empty"
        return "stale" if self._learning.learner.is_stale(said.versions) else None

    async def _keep(self, ids: Sequence[str], said: Sequence[Answer]) -> list[Outcome]:
        """Keep the choices until their rewards come, or score the only one as the end of a trajectory."""
        collect, later = self._collect, self._learning.learner.later
        assert later is not None
        going = collect.going
        dropped: dict[str, Reason] = {
            id: reason for id, a in zip(ids, said, strict=True) if (reason := self._doomed(a))
        }
        kept = [(i, id, answer) for i, (id, answer) in enumerate(zip(ids, said, strict=True)) if id not in dropped]
        try:
            if going is None:
                begun = self._beginnings([i for i, _, _ in kept])
                await later.keep([(id, begun[i // self._n], self._exchange(i, a)) for i, id, a in kept])
            elif len(later.get(going.id).pieces) == going.exchanges:
                await later.keep([(going.id, None, self._exchange(i, a)) for i, _, a in kept])
            else:
                dropped = dict.fromkeys(ids, "superseded")
            if going is None or collect.later or dropped:
                return [_collected(id if going is None else going.id, dropped.get(id)) for id in ids]
            (score,) = await self._scores(said)
            fresh = score is None or await later.reward(going.id, score)
        except TandemError as e:  # Serving continues without the database.
            log("trajectories not kept", error=e.message)
            return [_collected(id, "storage_error") for id in ids]
        return [_collected(going.id, None if fresh else "stale") | {"score": score}]

    def _beginnings(self, kept: Sequence[int]) -> list[Beginning]:
        """Return the beginning of each prompt's trajectories, when the choices with the numbers `kept` are kept."""
        collect = self._collect
        known = self._n > 1 and not collect.shared
        sizes = [sum(i // self._n == k for i in kept) if known else 0 for k in range(len(collect.groups))]
        return [
            Beginning(group, size, collect.params.temperature, collect.metadata, truncation(collect.params))
            for group, size in zip(collect.groups, sizes, strict=True)
        ]

    async def _scores(self, said: Sequence[Answer]) -> list[float | None]:
        """Return the score of each choice; None where there is none."""
        from mlx_tandem.training.rewards import Sample

        collect = self._collect
        samples = [
            Sample(
                collect.prompts[i // self._n],
                self._written(a),
                collect.metadata,
                len(a.tokens),
                a.reason,
                (*self._prompts[i // self._n], *a.tokens),
            )
            for i, a in enumerate(said)
        ]
        scores = await self._learning.learner.rewards.score([collect.scoring] * len(samples), samples)
        if self._scored is not None:
            await self._learning.later(self._scored(scores))
        return scores

    def _exchange(self, index: int, own: Answer) -> Exchange:
        """Return what choice number `index` was given and has said."""
        talk, prompt = self._collect.talk, self._prompts[index // self._n]
        going = self._collect.going
        return Exchange(
            given=tuple(prompt if going is None else prompt[going.tokens :]),
            tokens=tuple(own.tokens),
            logprobs=tuple(lp.sampled for lp in own.logprobs),
            model_logprobs=tuple(lp.model for lp in own.logprobs),
            versions=tuple(own.versions),
            messages=0 if talk is None else talk.messages,
            rendered=b"" if talk is None else talk.rendered,
            finish_reason=own.reason,
        )

    async def _settle(self, ids: Sequence[str], said: Sequence[Answer]) -> tuple[list[float | None], dict[str, Reason]]:
        """Score and collect the choices. Return the scores, and the reasons for those not collected, by id."""
        collect, learner = self._collect, self._learning.learner
        scores = await self._scores(said)
        dropped: dict[str, Reason] = {}
        if not collect.keep:
            return scores, dropped
        now = self._learning.clock()
        scored: list[list[Trajectory]] = [[] for _ in collect.groups]
        for i, (id, score) in enumerate(zip(ids, scores, strict=True)):
            if not said[i].tokens:
                dropped[id] = "empty"
            elif score is None:
                dropped[id] = "no_score"
            else:
                scored[i // self._n].append(self._trajectory(i, said[i], id, score, now))
        self._compare(scored)
        try:
            stale = await asyncio.gather(
                *(learner.add(group, 0 if collect.shared or self._n == 1 else len(group)) for group in scored if group)
            )
        except TandemError as e:  # Serving continues without the database.
            log("trajectories not collected", error=e.message)
            return scores, dropped | {t.id: "storage_error" for group in scored for t in group}
        return scores, dropped | dict.fromkeys(frozenset[str]().union(*stale), "stale")

    def _compare(self, scored: Sequence[Sequence[Trajectory]]) -> None:
        """Have the prompts of a request in the control arm answered by the other version, too."""
        collect = self._collect
        if collect.pair is None:
            return
        from mlx_tandem.training.online.prompts import Prompt

        for prompt, text, name, group in zip(self._prompts, collect.prompts, collect.groups, scored, strict=True):
            own = name if is_across(name) else ""
            asked = Prompt(tuple(prompt), collect.scoring, collect.params, text, own)
            self._learning.learner.wait(asked, [t.reward for t in group], self._n, collect.pair)

    def _trajectory(self, index: int, own: Answer, id: str, score: float, created: float) -> Trajectory:
        """Return the trajectory of choice number `index`."""
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
            truncation=truncation(collect.params),
            finish_reason=own.reason,
        )


def _collected(id: str, dropped: Reason | None) -> Outcome:
    """Return the outcome of a choice that should be collected, without its score."""
    return {"trajectory_id": id} if dropped is None else {"trajectory_id": None, "dropped": dropped}
