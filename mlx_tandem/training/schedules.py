"""Schedules of the learning rate: a rise in a line, then a constant rate, or a fall in a line or along a cosine."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

ScheduleKind = Literal["constant", "linear", "cosine"]
"""The course of the learning rate after the rise."""


class Schedule(Struct, frozen=True):
    """The share of the highest learning rate that each step of the optimiser has.

    The share rises in a line over `warmup_steps` steps, of which the last has 1. Then it falls over `decay_steps` steps
    from 1 to `floor`, which all later steps have. With the kind "constant", or with `decay_steps` 0, it does not fall.
    """

    kind: ScheduleKind = "constant"
    warmup_steps: int = 0
    decay_steps: int = 0
    floor: float = 0.0  # 0 to 1; during the rise the share may be below it

    @classmethod
    def over(cls, kind: ScheduleKind, steps: int, warmup_steps: int, floor: float = 0.0) -> Schedule:
        """Return the schedule of a training of `steps` steps, whose fall takes all steps after the rise."""
        return cls(kind, warmup_steps, max(steps - warmup_steps, 0), floor)

    def share(self, step: int) -> float:
        """Return the share of step number `step`, from 1 on."""
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        if self.kind == "constant" or not self.decay_steps:
            return 1.0
        gone = min((step - self.warmup_steps - 1) / self.decay_steps, 1.0)
        left = 1.0 - gone if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * gone))
        return self.floor + (1.0 - self.floor) * left
