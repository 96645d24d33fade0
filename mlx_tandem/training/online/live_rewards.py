"""Rewards of live traffic: their mean for each version, and an alarm when they fall.

Versions that answer different prompts cannot be compared by their means: the prompts may have become harder. Nothing
is rolled back for such means, therefore; an alarm says what was seen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from mlx_tandem.training.evidence import Comparison

LAG = 64
"""Prompts between the two whose rewards the alarm compares."""

ALARM_ERROR = 0.01
"""Probability of an alarm, ever, while prompts and policy stay as they are."""

MEMORY = 256
"""The newest prompt counts at least 1 / MEMORY in the mean of its version."""


class Mean(Struct):
    """A mean of rewards that forgets."""

    count: int = 0
    mean: float = 0.0

    def add(self, x: float) -> None:
        """Count the mean reward of a prompt's answers."""
        self.count += 1
        self.mean += (x - self.mean) / min(self.count, MEMORY)


class LiveRewards:
    """Rewards of live traffic. Everything is counted by prompt, not by answer: answers to one prompt are alike."""

    def __init__(self, drop: float) -> None:
        """Raise the alarm for a mean that has fallen by more than `drop`."""
        self.means: dict[int, Mean] = {}
        self.alarm = ""
        """What the last alarm has seen; empty: there was none."""
        self._drop = drop
        self._comparison = Comparison()
        self._earlier: deque[float] = deque(maxlen=2 * LAG)

    def add(self, rewards: Sequence[float], version: int) -> None:
        """Count the answers of a version to one prompt. `version` 0 is the base, which no version's mean counts."""
        reward = math.fsum(rewards) / len(rewards)
        if version:
            self.means.setdefault(version, Mean()).add(reward)
        if len(self._earlier) >= LAG:
            self._comparison.add(reward - self._earlier[-LAG])
        self._earlier.append(reward)

    def look(self) -> bool:
        """Return whether the rewards have fallen since the last look so that `alarm` has something to say."""
        seen = list(self._earlier)
        before, now = seen[:LAG], seen[LAG:]
        if not now or not self._comparison.harm.rejects(ALARM_ERROR):
            return False
        earlier, later = math.fsum(before) / len(before), math.fsum(now) / len(now)
        if earlier - later <= self._drop:
            return False
        self.alarm = (
            f"the mean reward of the last {len(now)} prompts is {later:.3g}, that of the {len(before)} before them was "
            f"{earlier:.3g}"
        )
        self._comparison = Comparison()
        return True

    def keep(self, versions: Iterable[int]) -> None:
        """Forget the means of all other versions."""
        wanted = set(versions)
        self.means = {v: m for v, m in self.means.items() if v in wanted}
