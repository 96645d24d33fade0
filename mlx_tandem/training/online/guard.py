"""Whether an update may stand: pure bookkeeping over numbers that others have measured.

k3 (Schulman 2020) estimates the divergence of two policies from tokens that the first has drawn: the mean of
exp(d) - 1 - d, where d is the second's logprob less the first's. It is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from mlx_tandem.training.trajectories import Trajectory

Verdict = Literal["ok", "corrected", "refused"]

TOLERANCE = 1e-3
"""Nats of k3 between sampler and trainer that rounding explains; above it the loss's importance weights have work."""

GIVE_UP = 3
"""Rollbacks with no accepted update between them, after which training pauses."""

MEMORY = 8
"""A version's mean reward forgets: it counts at most so many times as many completions as it takes to judge one."""


def k3(differences: Iterable[float]) -> float | None:
    """Return the mean k3 of these differences of logprobs; None of nothing, infinite when one is no number."""
    total, count = 0.0, 0
    for d in differences:
        count += 1
        total += math.expm1(min(d, 60.0)) - d if math.isfinite(d) else math.inf
    return max(total / count, 0.0) if count else None


def mismatch(trajectories: Sequence[Trajectory], own: Sequence[Sequence[float]], version: int) -> float | None:
    """Return k3 of the trainer to the sampler, over tokens that were sampled under `version`; None when there are none.

    `version` is what the trainer's weights are, and `own` the trainer's logprobs at temperature 1.
    """
    return k3(
        p - q
        for t, ps in zip(trajectories, own, strict=True)
        if not t.external
        for p, q, v in zip(ps, t.model_logprobs, t.versions, strict=False)
        if v == version
    )


def verdict(mismatch_k3: float | None, refuse: float) -> Verdict:
    """Return what an update may do that was measured so; ok also when nothing could be measured."""
    if mismatch_k3 is None or mismatch_k3 <= min(TOLERANCE, refuse):
        return "ok"
    return "corrected" if mismatch_k3 <= refuse else "refused"


def movement(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """Return k3 in nats that a step has moved the policy, from logprobs of the same tokens."""
    pairs = (pair for b, a in zip(before, after, strict=True) for pair in zip(b, a, strict=True))
    return k3(a - b for b, a in pairs) or 0.0


class Course(Struct):
    """What the guard has learned on the way and must know after a restart."""

    rate_scale: float = 1.0  # of the learning rate
    rollbacks: int = 0
    in_a_row: int = 0
    best: float | None = None  # highest mean reward on the validation prompts

    def note(self, outcome: str) -> None:
        """Note what became of an update. After a step that was too much, steps are half as long."""
        if outcome == "rolled_back":
            self.rate_scale /= 2
            self.rollbacks += 1
            self.in_a_row += 1
        elif outcome in ("published", "kept"):
            self.in_a_row = 0

    @property
    def lost(self) -> bool:
        """Whether training pauses after too many rollbacks in a row."""
        return self.in_a_row >= GIVE_UP

    def passes(self, reward: float | None, drop: float) -> bool:
        """Return whether a candidate of this mean reward may be published; None: it could not be judged.

        It must be within half of the allowed `drop` of the best ever: the prompts are a sample, and the other half is
        for what they do not see.
        """
        if reward is None or (self.best is not None and reward < self.best - drop / 2):
            return False
        self.best = reward if self.best is None else max(self.best, reward)
        return True


class Mean(Struct):
    """A mean of rewards that forgets: the newest always counts at least 1 / `memory`."""

    count: int = 0
    mean: float = 0.0
    square: float = 0.0

    def add(self, x: float, memory: int) -> None:
        """Count a reward."""
        self.count += 1
        share = 1.0 / min(self.count, memory)
        self.mean += (x - self.mean) * share
        self.square += (x * x - self.square) * share

    def error(self, memory: int) -> float:
        """Return the standard error of the mean, squared."""
        return max(self.square - self.mean**2, 0.0) / min(self.count, memory)


class Rewards:
    """Mean rewards of live completions by the version that made them, for want of validation prompts.

    A version is judged once it has `enough` completions. It has fallen when its mean is more than `drop` below the
    best one's by twice the standard error of the difference: fewer completions need a clearer difference.
    """

    def __init__(self, enough: int, drop: float) -> None:
        self._enough, self._drop = max(enough, 2), drop
        self._memory = MEMORY * self._enough
        self.means: dict[int, Mean] = {}

    def add(self, version: int, reward: float) -> None:
        """Count a reward of a version."""
        self.means.setdefault(version, Mean()).add(reward, self._memory)

    def keep(self, versions: Iterable[int]) -> None:
        """Forget all others."""
        wanted = set(versions)
        self.means = {v: m for v, m in self.means.items() if v in wanted}

    def mean(self, version: int) -> float | None:
        """Return the mean reward of a version; None while it cannot be judged."""
        found = self.means.get(version)
        return found.mean if found is not None and found.count >= self._enough else None

    @property
    def best(self) -> int:
        """The version with the highest mean of those that can be judged; 0: none can."""
        judged = {v: m.mean for v, m in self.means.items() if m.count >= self._enough}
        return max(judged, key=lambda v: (judged[v], v), default=0)

    def fallen(self, version: int) -> bool:
        """Return whether `version` is clearly worse than `best`."""
        mine, best = self.means.get(version), self.means.get(self.best)
        if mine is None or best is None or mine.count < self._enough:
            return False
        error = math.sqrt(mine.error(self._memory) + best.error(self._memory))
        return mine.mean + 2 * error < best.mean - self._drop
