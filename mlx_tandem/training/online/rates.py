"""The learning rate that moves the policy by a target of nats per update, found by what each update has measured.

The divergence of a small step (k3, `guard.py`) grows with the square of the learning rate. An update at the rate r that
moved the policy by m nats therefore says that r * sqrt(target / m) is the right rate. One measurement is noisy, and
sometimes a hundred times too high. So the rate is the geometric mean of what the last updates say.

Where rewards are noise, the gradients of updates cancel, and a policy that moves at all only wanders away from what it
can do. This shows in the cosine of each gradient with the mean of earlier ones: about 0 for noise, and about 0.5 where
there is something to learn. Only a share of the rate is used unless gradients agree. The cosine does not depend on the
rate, so that a low rate hides no later agreement.
"""

from __future__ import annotations

import math

from msgspec import Struct

FIRST = 3e-5
"""The rate of the first update, which is too low for most adapters."""

LEAST, MOST = 1e-7, 1e-3
"""Bounds of the rate."""

MOST_CHANGE = 4.0
"""The most by which one update multiplies or divides the rate."""

FAR = 16.0
"""The most by which what one measurement says differs from the present rate, in either direction."""

KEPT = 0.9
"""Factor by which each new measurement lowers the weight of all earlier ones: about ten updates decide."""

AGREED = 0.2
"""Mean cosine, less its standard error, from which the whole rate is used."""

LEAST_SHARE = 1 / 16
"""Share of the rate that is used where gradients do not agree at all."""


class Pace(Struct):
    """The rate found so far, and the weighted sums that it follows from."""

    rate: float = FIRST  # if gradients agree
    count: float = 0.0  # of measurements of the movement
    logs: float = 0.0  # of the rates that they say are right
    agreements: float = 0.0  # of measured cosines
    agreed: float = 0.0  # of these
    squares: float = 0.0  # of the same

    @property
    def share(self) -> float:
        """The share of the rate that is used; 1 before the first cosine, and then as if one more had been 0."""
        if not self.agreements:
            return 1.0
        count = self.agreements + 1.0
        mean = self.agreed / count
        error = math.sqrt(max(self.squares / count - mean * mean, 0.0) / count)
        return min(max((mean - error) / AGREED, LEAST_SHARE), 1.0)

    @property
    def next(self) -> float:
        """The rate of the next update."""
        return max(self.rate * self.share, LEAST)

    def note(self, moved: float, used: float, target: float, agreement: float | None = None) -> None:
        """Note that an update at the rate `used` has moved the policy by `moved` nats. The rate 0 is not counted.

        `agreement` is the cosine of its gradient with the mean of earlier ones; None: there were none.
        """
        if agreement is not None:
            self.agreements = KEPT * self.agreements + 1.0
            self.agreed = KEPT * self.agreed + agreement
            self.squares = KEPT * self.squares + agreement * agreement
        if not used:
            return
        right = used * math.sqrt(target / moved) if moved else math.inf
        right = min(max(right, self.rate / FAR), self.rate * FAR)
        self.count = KEPT * self.count + 1.0
        self.logs = KEPT * self.logs + math.log(right)
        wanted = math.exp(self.logs / self.count)
        self.rate = min(max(wanted, self.rate / MOST_CHANGE, LEAST), self.rate * MOST_CHANGE, MOST)
