"""Computes the figures of a round of streamed requests, and how modes compare."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.bench.workloads import BASELINES

RATIOS = (*BASELINES.items(), ("same", "base"), ("mixed", "base"))
"""Pairs of modes whose throughput is compared."""
Rounds = Mapping[tuple[int, str], Sequence[dict[str, Any]]]
"""The figures of all rounds by (concurrency, mode)."""


def figures(streams: Sequence[Stream], held_back: int = 0) -> dict[str, Any]:
    """Return the figures of one round, with times in milliseconds.

    A refusal (429, 503) is not an error. `held_back` is the number of requests that were due and never sent.
    """
    good = [s for s in streams if s.problem is None]
    refused = [s for s in streams if s.refused]
    bad = [s for s in streams if s.problem is not None and not s.refused]
    wall = max((s.finished for s in streams), default=0.0) - min((s.sent for s in streams), default=0.0)
    tokens = sum(s.tokens for s in good)
    events = sum(s.events for s in good)
    return {
        "requests": len(streams),
        "errors": len(bad),
        "first_error": bad[0].error if bad else None,
        "error_kinds": dict(Counter(s.problem for s in bad)),
        "refused": len(refused),
        "refusals": _refusals(refused) if refused else None,
        "held_back": held_back,
        "wall_s": round(wall, 4),
        "tokens": tokens,
        "events": events,
        "prompt_tokens": round(sum(s.prompt_tokens for s in good) / max(1, len(good)), 1),
        "tokens_per_s": round(tokens / wall, 2) if wall else 0.0,
        "events_per_s": round(events / wall, 2) if wall else 0.0,
        "ttft_ms": spread([s.first for s in good], 1e3),
        "inter_token_ms": spread([gap for s in good for gap in s.gaps()], 1e3),
        "latency_ms": spread([s.latency for s in good], 1e3),
    }


def _refusals(refused: Sequence[Stream]) -> dict[str, Any]:
    waits = [float(s.retry_after) for s in refused if s.retry_after and s.retry_after.isdecimal()]
    return {
        "statuses": dict(Counter(str(s.problem) for s in refused)),
        "latency_ms": spread([s.latency for s in refused], 1e3),
        "retry_after_s": {"min": min(waits), "max": max(waits)} if waits else None,
        "without_retry_after": len(refused) - len(waits),
    }


def ratios(rounds: Rounds) -> list[dict[str, Any]]:
    """Return the throughput of modes relative to others: medians over the rounds, each compared with its neighbour
    in time.
    """
    found = []
    for concurrency in sorted({c for c, _ in rounds}):
        row: dict[str, Any] = {"concurrency": concurrency}
        for over, under in RATIOS:
            pairs = zip(rounds.get((concurrency, over), []), rounds.get((concurrency, under), []), strict=False)
            values = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs if b["tokens_per_s"]]
            if values:
                row[f"{over}/{under}"] = round(statistics.median(values), 3)
        if len(row) > 1:
            found.append(row)
    return found


def overheads(ratios: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], float]:
    """Return by (concurrency, mode) how its throughput differs from that of one adapter's rows, in per cent."""
    return {
        (row["concurrency"], mode): round(100 * (row[f"{mode}/{under}"] - 1), 1)
        for row in ratios
        for mode, under in BASELINES.items()
        if f"{mode}/{under}" in row
    }
