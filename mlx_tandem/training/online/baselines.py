"""The baseline across prompts: what answers to any prompt that are scored alike were worth so far.

An answer without siblings is compared with it. The baseline of an answer never has the answer's own reward in it, so
that it changes how noisy the gradient is and not where it points (Kool et al. 2019, leave-one-out).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from mlx_tandem.training.trajectories import Trajectory, is_across

MEMORY = 64
"""Earlier answers count as at most so many in a baseline, since they are of earlier versions."""

MOST = 256
"""Most baselines that are kept; those that were not used for longest go first."""


class Baseline(Struct):
    """The running mean of earlier rewards."""

    count: int = 0
    mean: float = 0.0

    def against(self, rewards: Sequence[float]) -> list[float]:
        """Return each reward less the mean of the others and of the earlier ones; 0 where there are none."""
        weight = min(self.count, MEMORY)
        whole = weight * self.mean + math.fsum(rewards)
        others = weight + len(rewards) - 1
        return [r - (whole - r) / others if others else 0.0 for r in rewards]

    def add(self, rewards: Sequence[float]) -> None:
        """Count rewards that have been learned from."""
        for reward in rewards:
            self.count += 1
            self.mean += (reward - self.mean) / min(self.count, MEMORY)


Baselines = dict[str, Baseline]
"""The baseline of each group across prompts, by the group's name, the one used last at the end."""


def rewards_across(groups: Sequence[Sequence[Trajectory]]) -> dict[str, tuple[float, ...]]:
    """Return the rewards of those groups that are across prompts, by their names."""
    return {group[0].group: tuple(t.reward for t in group) for group in groups if is_across(group[0].group)}


def note(baselines: Baselines, rewards: dict[str, tuple[float, ...]]) -> None:
    """Count rewards by group in their baselines."""
    for name, own in rewards.items():
        baseline = baselines.pop(name, None) or Baseline()
        baseline.add(own)
        baselines[name] = baseline
    while len(baselines) > MOST:
        del baselines[next(iter(baselines))]
