"""How far sampler, trainer and updates differ, and what rollbacks do to the learning rate.

k3 (Schulman 2020) estimates the divergence of two policies from tokens that the first has drawn: the mean of
exp(d) - 1 - d, where d is the second's logprob less the first's. It is never negative.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Literal

from msgspec import Struct, field

from mlx_tandem.config import LearningRate
from mlx_tandem.training.online.rates import Pace
from mlx_tandem.training.trajectories import Trajectory

Verdict = Literal["ok", "corrected", "refused"]

TOLERANCE = 1e-3
"""Nats of k3 between sampler and trainer that rounding explains; above it the loss's importance weights have work."""

MOVED = 1 / 128
"""Least share of a measured movement that is not taken for rounding."""

GIVE_UP = 10
"""Rollbacks with no accepted update between them, after which training pauses."""

RECOVERY = 2 ** (1 / 16)
"""By which factor the rate recovers with each update that stands, so that 16 of them make up for one rollback."""


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
        for p, q, v, own in zip(ps, t.model_logprobs, t.versions, t.mask or repeat(1), strict=False)
        if v == version and own
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
    """What updates and the guard have taught about the learning rate, which must be known after a restart."""

    rate_scale: float = 1.0  # of the learning rate
    rollbacks: int = 0
    in_a_row: int = 0
    rate: LearningRate = 0.0  # the learning rate of the settings that the scale belongs to; 0: not known
    pace: Pace = field(default_factory=Pace)  # what "auto" has found

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update before its schedule."""
        return (self.pace.next if self.rate == "auto" else self.rate) * self.rate_scale

    def begin(self, rate: LearningRate) -> None:
        """Begin with the learning rate of the settings. One that somebody has changed begins unscaled."""
        if self.rate not in (0.0, rate):
            self.rate_scale, self.in_a_row = 1.0, 0
        self.rate = rate

    def moved(
        self, nats: float, used: float, target: float, rounding: float = 0.0, agreement: float | None = None
    ) -> None:
        """Note that an update at the rate `used` has moved the policy by `nats`. Of these, `rounding` may be none: so
        much do sampler and trainer disagree while the weights are the same. `agreement` is that of its gradient with
        earlier ones, as `Pace.note` has it.
        """
        if self.rate == "auto":
            self.pace.note(max(nats - min(rounding, TOLERANCE), MOVED * nats), used, target, agreement)

    def note(self, outcome: str) -> None:
        """Note the outcome of an update. A rollback halves the rate, which updates that stand raise again."""
        if outcome == "rolled_back":
            self.rate_scale /= 2
            self.rollbacks += 1
            self.in_a_row += 1
        elif outcome in ("published", "kept"):
            self.rate_scale = min(1.0, self.rate_scale * RECOVERY)
            self.in_a_row = 0

    @property
    def lost(self) -> bool:
        """Whether training pauses after too many rollbacks in a row."""
        return self.in_a_row >= GIVE_UP
