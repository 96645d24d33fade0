"""The learning rate that moves the policy by a target of nats per update, found by what each update has measured.

The divergence of a small step (k3, `guard.py`) grows with the square of the learning rate. With `moved` the nats and
`used` the rates of past updates, the rate is therefore sqrt(target * sum(used²) / sum(moved)). One measurement is noisy
and sometimes ten times too high. So sums over several updates decide, and a very high measurement weighs less.

While the last updates have hardly moved the policy, the rate rises fast, as it does at first. Otherwise it rises slowly
and falls fast: where rewards are noise, gradients cancel and updates move the policy less, which must not make the rate
large.
"""

from __future__ import annotations

import math

from msgspec import Struct

FIRST = 3e-5
"""The rate of the first update, which is too low for most adapters."""

LEAST, MOST = 1e-7, 1e-3
"""Bounds of the rate. Updates from noise move the policy less, so that only the upper bound limits the rate."""

MOST_CHANGE = 4.0
"""The most by which one update divides the rate, and multiplies it while updates hardly move the policy."""

MOST_RISE = 1.1
"""The most by which one update multiplies the rate otherwise."""

HARDLY = 1 / 64
"""Share of the target below which an update hardly moves the policy: an eighth of the right rate."""

KEPT = 0.9
"""Factor by which each new measurement lowers the weight of all earlier ones: about ten updates decide."""


class Pace(Struct):
    """The rate found so far, and the weighted sums that it follows from."""

    rate: float = FIRST
    nats: float = 0.0  # by which updates have moved the policy
    squares: float = 0.0  # of their rates
    lately: float = 0.0  # mean of the nats in which each update counts half of the one after it

    def note(self, moved: float, used: float, target: float) -> None:
        """Note that an update at the rate `used` has moved the policy by `moved` nats. The rate 0 is not counted."""
        if not used:
            return
        weight = min(1.0, MOST_CHANGE**2 * target / moved) if moved else 1.0
        self.nats = KEPT * self.nats + weight * moved
        self.squares = KEPT * self.squares + weight * used * used
        wanted = math.sqrt(target * self.squares / self.nats) if self.nats else math.inf
        most = self.rate * (MOST_CHANGE if self.lately < HARDLY * target else MOST_RISE)
        self.rate = min(max(wanted, self.rate / MOST_CHANGE, LEAST), most, MOST)
        self.lately = (self.lately + moved) / 2
