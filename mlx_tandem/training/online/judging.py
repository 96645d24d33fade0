"""Judging the served versions: every comparison with the accepted version, wherever it comes from, ends up here.

There are three sources: the control arm of live traffic, validation prompts, and answers of both versions to the same
prompt that a client sends for an update. Together they are one test over the whole run.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.engine.client import EngineClient
from mlx_tandem.training.online import prompts
from mlx_tandem.training.online.arms import Arms, Pair, Waiting
from mlx_tandem.training.online.ledger import Ledger
from mlx_tandem.training.online.live_rewards import LiveRewards
from mlx_tandem.training.online.prompts import Prompt, Scorer, Validation
from mlx_tandem.training.online.serving import Serving
from mlx_tandem.training.online.trial import Reference, Trial
from mlx_tandem.training.online.versions import Versions
from mlx_tandem.training.store.checkpoints import BEST
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterRef, AdapterSource

log = logging.getLogger(__name__)

TOLERATED = 1 / 3
"""Share of `guard_reward_drop` by which validation prompts may be answered worse."""


class Judging:
    """Compares versions with the accepted one. What follows from the comparisons is the learner's business."""

    def __init__(
        self,
        config: RLTrainingConfig,
        ledger: Ledger,
        versions: Versions,
        serving: Serving,
        rewards: Scorer,
        clock: Callable[[], float],
    ) -> None:
        self.validation = Validation(serving, rewards)
        self.live = LiveRewards(config.guard_reward_drop)
        self.arms = Arms(config.guard_prompts)
        self._config, self._ledger, self._versions = config, ledger, versions
        self._serving, self._rewards, self._clock = serving, rewards, clock

    @property
    def trial(self) -> Trial:
        """The state of the test."""
        return self._ledger.counters.trial

    @property
    def compares(self) -> bool:
        """Whether there is anything to compare versions by, so that they can be accepted and taken back."""
        return self._config.guard_prompts > 0 or bool(self._config.validation_prompts)

    @property
    def accepted(self) -> AdapterRef | None:
        """The accepted version; None while there is none, or its checkpoint is gone."""
        reference = self.trial.accepted
        known = None if reference is None else self._versions.get(reference.version)
        return (
            known.ref if known is not None and reference is not None and known.ref.digest == reference.digest else None
        )

    @property
    def is_worse(self) -> bool:
        """Whether the served versions are shown to be worse than the accepted one, which is another one."""
        head, accepted = self._versions.head, self.accepted
        if accepted is None or (head is not None and head.ref.digest == accepted.digest):
            return False
        return self.trial.is_worse(self._config.guard_false_rollback)

    @property
    def said_worse(self) -> str:
        """How much worse the versions since the accepted one are, in words."""
        comparison = self.trial.comparison
        return f"worse than the accepted version by {-comparison.mean:.3g} on {comparison.count} prompts"

    async def find_accepted(self, client: EngineClient) -> None:
        """Let a new engine have the accepted version: that of the newest checkpoint where none was accepted or the
        accepted one's checkpoint is gone.
        """
        trial, checkpoints = self.trial, self._ledger.checkpoints
        names = {info.name for info in self._ledger.listed}
        if trial.accepted is None or trial.accepted.checkpoint not in names:
            newest = next((i for i in self._ledger.listed if i.name != BEST), None)
            found = newest is not None and newest.version > 0
            trial.begin(Reference(newest.name, newest.version, newest.digest) if newest and found else None)
        if trial.candidate is not None and trial.candidate.checkpoint not in names:
            trial.candidate = None
        accepted = trial.accepted
        if accepted is not None and self._versions.get(accepted.version) is None:
            folder = str(checkpoints.path(accepted.checkpoint))
            info = await client.load_adapter(AdapterSource(folder))
            self._versions.reserve(info, accepted.version)
            self._versions.saved(info, folder, accepted.checkpoint)

    def compare(self, difference: float, tolerated: float = 0.0) -> None:
        """Count how much better than by the accepted version a prompt was answered, and by how much it may be worse;
        durable with the next flush.
        """
        self._ledger.compared(difference, tolerated)

    # -- live traffic ---------------------------------------------------------------------------------------------

    def choose(self, asked: AdapterRef) -> Pair | None:
        """Return who answers a prompt for which the version `asked` was asked; None: that version alone."""
        head, accepted = self._versions.head, self.accepted
        if head is None or accepted is None or self._versions.switched or self._ledger.is_behind:
            return None
        if asked.digest != head.ref.digest:
            return None
        return self.arms.choose(head.ref, accepted, self.trial.comparison.effort)

    def see(self, group: Sequence[Trajectory]) -> None:
        """Count live answers to one prompt in the mean of the version that made them."""
        by_version: dict[int, list[float]] = {}
        for t in group:
            if t.versions:
                by_version.setdefault(t.versions[-1], []).append(t.reward)
        for version, rewards in by_version.items():
            self.live.add(rewards, version)
        if self.live.look():
            log.error("rewards have fallen", extra={"fields": {"seen": self.live.alarm}})

    def see_sent(self, trajectories: Iterable[Trajectory]) -> None:
        """Count what a client sends for an update. Answers of the accepted version and of later ones to the same
        prompt are compared.
        """
        by_prompt: dict[tuple[int, ...], list[Trajectory]] = {}
        for t in trajectories:
            by_prompt.setdefault(t.prompt, []).append(t)
        accepted = self.accepted
        for group in by_prompt.values():
            self.see(group)
            if accepted is not None:
                old = [t.reward for t in group if set(t.versions) == {accepted.version}]
                new = [t.reward for t in group if t.versions and min(t.versions) > accepted.version]
                if old and new:
                    self.compare(_mean(new) - _mean(old))

    async def draw(self) -> list[list[Trajectory]]:
        """Have some waiting prompts answered by their second versions, compare, and return these answers.

        Raises EngineError; the prompts are given up then.
        """
        found = await asyncio.gather(*(self._answered(w) for w in self.arms.take()))
        return [group for group in found if group]

    async def _answered(self, waiting: Waiting) -> list[Trajectory]:
        accepted, pair = self.accepted, waiting.pair
        if accepted is None or accepted.digest not in (pair.first.digest, pair.second.digest):
            return []  # another version has been accepted meanwhile
        if self._versions.get(pair.second.version) is None:
            return []  # it has gone meanwhile
        [group] = await prompts.groups(
            self._serving, self._rewards, [waiting.prompt], waiting.n, pair.second, self._clock
        )
        if 2 * len(group) >= waiting.n and self.accepted == accepted:
            difference = _mean([t.reward for t in group]) - waiting.reward
            self.compare(-difference if pair.second.digest == accepted.digest else difference)
        return group

    def wait(self, prompt: Prompt, rewards: Sequence[float], n: int, pair: Pair) -> None:
        """Have a prompt of the control arm answered by the second version, too. `rewards` are those of the first."""
        if 2 * len(rewards) >= n:
            self.arms.waiting.append(Waiting(prompt, n, pair, _mean(rewards)))

    # -- validation prompts ---------------------------------------------------------------------------------------

    async def validate(self, candidate: AdapterRef) -> float | None:
        """Compare a version with the accepted one on the validation prompts, and return its mean reward.

        None: fewer than half of its answers could be scored. Raises EngineError.
        """
        n = round(self._config.validation_answers * self.trial.comparison.effort)
        new = await self.validation.rewards(candidate, n)
        known = [mean for mean in new if mean is not None]
        if 2 * len(known) < len(new):
            return None
        accepted = self.accepted
        if accepted is not None and accepted.digest != candidate.digest:
            old = await self.validation.rewards(accepted, n)
            self.validation.drawn()
            for a, b in zip(new, old, strict=True):
                if a is not None and b is not None:
                    # The same few prompts come again each time, and a version may be lucky with some of them.
                    self.compare(a - b, self._config.guard_reward_drop * TOLERATED)
        return _mean(known)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
