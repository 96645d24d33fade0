"""How fast work ends that is open at the same time, from which waits are estimated."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

HISTORY = 256
"""Number of the last endings over which the rate is measured."""


class EndingRate:
    """The rate at which work has ended, measured over the last HISTORY endings and busy time only.

    Work has an amount, such as 1 for a request, or its number of tokens.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.open = 0  # work that has begun and not ended
        self._busy = 0.0  # seconds before `_since` during which any work was open
        self._since = 0.0  # when the current busy period began, by the clock
        self._endings: deque[tuple[float, float]] = deque([(0.0, 0.0)], HISTORY)  # busy seconds, amount

    def began(self) -> None:
        """Note that work has begun."""
        if not self.open:
            self._since = self._clock()
        self.open += 1

    def ended(self, amount: float = 1.0) -> None:
        """Note that work of this amount has ended."""
        self.open -= 1
        busy = self._busy + self._clock() - self._since
        self._endings.append((busy, amount))
        if not self.open:
            self._busy = busy

    def seconds_for(self, amount: float, first: float = 1.0) -> float:
        """Return the seconds in which this amount is expected to end.

        Until the first work has ended, the result assumes that an amount of `first` ends now.
        """
        seconds = self._busy - self._endings[0][0] + (self._clock() - self._since if self.open else 0.0)
        ended = sum(amount for _, amount in self._endings) - self._endings[0][1]
        return amount * max(seconds, 1e-3) / (ended or first)
