"""The control arm: prompts of live traffic that both the accepted version and the newest one answer.

Chance decides which prompts these are, and which of the two versions answers the client. The other version answers in
learning's share of the device, with the same parameters and seed. So a change of the traffic changes both sides alike.
"""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.types import AdapterRef

WAITING = 64
"""Most prompts that wait for their second answers; the oldest go first."""

AT_ONCE = 4
"""Prompts that are answered a second time between two updates."""


class Pair(NamedTuple):
    """The two versions that answer one prompt: `first` the client, `second` in the background."""

    first: AdapterRef
    second: AdapterRef


class Waiting(NamedTuple):
    """A prompt whose first answers are scored and whose second ones are missing."""

    prompt: Prompt
    n: int  # answers of each version
    pair: Pair
    reward: float  # mean of the first answers


class Arms:
    """Chooses the prompts of the control arm. `per_update` is how many an update should have; 0: none."""

    def __init__(self, per_update: int, rng: random.Random | None = None) -> None:
        self.waiting: deque[Waiting] = deque(maxlen=WAITING)
        self._per_update = per_update
        self._rng = rng or random.Random()
        self._seen = 0  # prompts since the last update
        self._pace = float(per_update)  # prompts per update, so far

    def choose(self, newest: AdapterRef, accepted: AdapterRef, effort: float) -> Pair | None:
        """Return who answers the next prompt; None: only the newest version. `effort` is by which factor more prompts
        than usual should be compared.

        The choice depends on earlier prompts alone, which the test's error rates require.
        """
        self._seen += 1
        wanted = self._per_update * effort
        if newest.digest == accepted.digest or self._rng.random() * max(self._pace, 1.0) >= wanted:
            return None
        return Pair(newest, accepted) if self._rng.random() < 0.5 else Pair(accepted, newest)

    def updated(self) -> None:
        """Note that an update has ended, to learn how many prompts there are between two."""
        self._pace += 0.3 * (self._seen - self._pace)
        self._seen = 0

    def take(self) -> list[Waiting]:
        """Return the next prompts to be answered a second time."""
        return [self.waiting.popleft() for _ in range(min(AT_ONCE, len(self.waiting)))]
