"""Whether drafts pay: decided by the tokens per millisecond that steps bring with them and without them."""

from __future__ import annotations

from dataclasses import dataclass, field

PROBE = 8
"""Steps of a measurement of the way that is not in use."""

FIRST = 24
"""Steps of the first measurement with drafts, in which sequences find out how many drafts suit them."""

SKIPPED = 2
"""Steps after a change that do not count: they were planned before it."""

SHORTEST, LONGEST = 128, 4096
"""Steps between two probes: the number doubles each time that the probe changes nothing."""

NEW = 64
"""Steps of new shapes that are left out for each size of batch. Where more and more of them come, they are what drafts
cost, and count."""

WORTHWHILE = 1.02
"""Least gain for which drafts are used; smaller differences are noise."""


@dataclass(slots=True)
class _Way:
    """The rate of steps with drafts or without them."""

    rate: float = 0.0  # tokens a row per millisecond; 0: unknown


@dataclass(slots=True)
class _Size:
    """What is known about batches of one size."""

    drafts: bool = True
    ways: dict[bool, _Way] = field(default_factory=lambda: {True: _Way(), False: _Way()})
    probing: bool = True  # whether the way in use is only being measured
    interval: int = SHORTEST
    left: int = FIRST
    skip: int = SKIPPED
    new: int = NEW  # steps of new shapes that may still be left out
    tokens: float = 0.0
    ms: float = 0.0

    def note(self, tokens: float, ms: float) -> None:
        """Count a step, and change the way when it has been measured or the other is to be probed."""
        if self.skip:
            self.skip -= 1
            return
        self.tokens += tokens
        self.ms += ms
        self.left -= 1
        if self.left > 0:
            return
        self.ways[self.drafts].rate = self.tokens / max(self.ms, 1e-6)
        self.tokens = self.ms = 0.0
        other = self.ways[not self.drafts]
        if not self.probing or not other.rate:
            self._turn(not self.drafts, PROBE, probing=True)
            return
        best = self.ways[True].rate > WORTHWHILE * self.ways[False].rate
        self.interval = min(2 * self.interval, LONGEST) if best != self.drafts else SHORTEST
        self._turn(best, self.interval, probing=False)

    def _turn(self, drafts: bool, steps: int, *, probing: bool) -> None:
        self.skip = SKIPPED if drafts != self.drafts else 0
        self.drafts, self.left, self.probing = drafts, steps, probing


class Payoff:
    """The measurements for each size of batch, where sizes are powers of two."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._size = _Size()
        self._rows = 1
        self._last: float | None = None  # milliseconds at the end of the step before, if it was usual
        self._held: tuple[float, float] | None = None  # tokens a row and milliseconds of that step, not counted yet

    def uses_drafts(self, rows: int) -> bool:
        """Return whether sequences should draft in a batch of so many; the next `note` is about this batch."""
        size = self._sizes.setdefault(rows.bit_length(), _Size())
        if size is not self._size:
            self._size, self._last, self._held = size, None, None
        self._rows = max(rows, 1)
        return size.drafts

    def interrupt(self) -> None:
        """Leave out the step that comes next, since nothing drafts in it."""
        self._last = None

    def note(self, now: float, tokens: int, *, usual: bool, new: bool = False) -> None:
        """Take in a step that ended at `now`, in milliseconds, and drew so many tokens.

        Only steps are measured that are `usual`, as the step before them was: that read no prompt, for example. A step
        of `new` shapes is not measured, nor is the step before it, which may have run while the host traced it.
        """
        held, self._held = self._held, None
        if new and self._size.new:
            self._size.new -= 1
        else:
            if held is not None:
                self._size.note(*held)
            if usual and self._last is not None:
                self._held = tokens / self._rows, now - self._last
        self._last = now if usual else None

    @property
    def state(self) -> dict[str, float | bool]:
        """The present batch size's decision and its rates in tokens a row per second, for people."""
        ways = self._size.ways
        return {
            "uses_drafts": self._size.drafts,
            "tokens_per_s_with": 1e3 * ways[True].rate,
            "tokens_per_s_without": 1e3 * ways[False].rate,
        }
