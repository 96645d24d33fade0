"""Statistics of lists of numbers, and medians over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any


def spread(values: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Return the mean and percentiles (nearest rank) times `scale`; all zero if there are no values."""
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}
    ordered = sorted(values)

    def percentile(p: float) -> float:
        return ordered[min(len(ordered) - 1, round(p * (len(ordered) - 1)))]

    figures = {"mean": statistics.fmean(ordered), "p50": percentile(0.5), "p95": percentile(0.95)}
    figures["p99"] = percentile(0.99)
    return {name: round(value * scale, 3) for name, value in figures.items()}


def median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the rounds field by field; fields that are not numbers, or missing in some round, are left
    out.
    """
    merged: dict[str, Any] = {}
    for key, first in rounds[0].items():
        values = [r[key] for r in rounds if r.get(key) is not None]
        if len(values) < len(rounds):
            continue
        if isinstance(first, dict):
            merged[key] = median(values)
        elif isinstance(first, (int, float)) and not isinstance(first, bool):
            merged[key] = round(statistics.median(values), 3)
    return merged
