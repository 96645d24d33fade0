"""Histograms as Prometheus has them, and the bounds of those that the engine keeps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of `EngineStats.step_tokens`, the same as vLLM's."""

FILL_PARTS = 10
"""Number of entries of `EngineStats.batch_fill`: tenths of the batch's seats."""


class Histogram:
    """The counts of values between each two of `bounds`, and the sum of all values.

    An observation costs a bisection and two additions.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0):
        self.bounds = bounds
        self.counts = list(counts) or [0] * (len(bounds) + 1)
        self.total = total

    def observe(self, value: float, count: int = 1) -> None:
        """Count `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """Return (bound, number of values up to it), cumulative and with "+Inf" last, as Prometheus wants them."""
        pairs: list[tuple[str, float]] = []
        seen = 0
        for bound, count in zip((*(str(float(b)) for b in self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            pairs.append((bound, float(seen)))
        return pairs
