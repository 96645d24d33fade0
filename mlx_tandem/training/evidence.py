"""Tests that may be looked at after every comparison: whether one version answers worse, or better, than another.

A test is a bet against the hypothesis that a version answers a prompt like the accepted one, or better. Each comparison
multiplies what is staked by 1 + b x, where x in [-1, 1] is the scaled difference and b a fixed fraction. While the
hypothesis holds, the wealth has no upward drift, so that it ever reaches 1 / e with probability e at most, however
often one looks (Ville's inequality; Waudby-Smith and Ramdas 2024, Howard et al. 2021). The wealth is a mixture over
bets and over the moments at which they begin, so that a change late in a long run is found, too.
"""

from __future__ import annotations

import math

from msgspec import Struct, field

BETS = (0.3, 0.6, 0.9)
"""Fractions of the stake that are bet. A small one finds small differences, a large one finds large ones soon."""

PATIENCE = 60
"""Comparisons after which half of the wealth is staked. Bets that begin later have what is left."""

SPREAD = 3.0
"""A difference counts fully from this many times the root of the mean square of the differences before it."""

MOST_EFFORT = 4.0
"""So many times as much is compared, at most, while versions look worse."""

RICHEST = 1e12
"""Bound of the wealth, which keeps the sums finite in a long run."""


class Evidence(Struct):
    """The wealth of one test. It begins at 1; `PATIENCE` decides when which part of it is staked."""

    reserve: float = 1.0
    stakes: list[float] = field(default_factory=lambda: [0.0] * len(BETS))
    count: int = 0

    def add(self, x: float) -> None:
        """Count a scaled difference in [-1, 1], where positive numbers speak against the hypothesis."""
        self.count += 1
        reserve = PATIENCE / (PATIENCE + self.count)
        each = (self.reserve - reserve) / len(BETS)
        self.reserve = reserve
        self.stakes = [
            min((stake + each) * (1.0 + bet * x), RICHEST) for stake, bet in zip(self.stakes, BETS, strict=True)
        ]

    def rejects(self, error: float) -> bool:
        """Return whether the hypothesis is refuted, which happens to a true one with probability `error` at most."""
        return self.wealth >= 1.0 / error

    @property
    def wealth(self) -> float:
        """The sum of the stakes and of what was not staked yet; 1 at the beginning."""
        return self.reserve + sum(self.stakes)

    @property
    def suspicion(self) -> float:
        """By which factor what was staked has grown so far; 1 at the beginning."""
        return sum(self.stakes) / (1.0 - self.reserve) if self.count else 1.0


class Comparison(Struct):
    """The differences of one version, or of several in turn, to the accepted version; one for each prompt.

    The scale of a difference is made of those before it. Rewards need no known range, therefore.
    """

    harm: Evidence = field(default_factory=Evidence)
    gain: Evidence = field(default_factory=Evidence)
    squares: float = 0.0  # of all differences so far
    seen: int = 0  # differences so far
    count: int = 0  # since the accepted version is the accepted one
    total: float = 0.0  # of these

    def add(self, difference: float, tolerated: float = 0.0) -> None:
        """Count how much better a prompt was answered than by the accepted version. `tolerated` is by how much it may
        be answered worse.
        """
        usual = SPREAD * math.sqrt(self.squares / max(self.seen, 1))
        self.harm.add(-_scaled(difference + tolerated, usual))
        self.gain.add(_scaled(difference, usual))
        self.squares += difference * difference
        self.seen += 1
        self.count += 1
        self.total += difference

    @property
    def effort(self) -> float:
        """By which factor more should be compared now, from 1 to MOST_EFFORT: the worse versions look, the more.

        It depends on earlier comparisons alone, which the test's error rates require.
        """
        return min(max(self.harm.suspicion, 1.0), MOST_EFFORT)

    @property
    def mean(self) -> float:
        """The mean difference; 0 before the first."""
        return self.total / self.count if self.count else 0.0


def _scaled(difference: float, usual: float) -> float:
    """Return the difference over `usual`, between -1 and 1."""
    scale = max(usual, abs(difference))
    return difference / scale if scale else 0.0
