"""Computes the results of `tandem bench engine`: medians of each side, and how the sides compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_tandem.cli.bench.floor import Floor

BASE, SAME, MIXED, DRAFTS, PEER = "tandem", "same", "mixed", "drafts", "batch_generator"
"""The sides: the engine without adapters, with one for all rows, with all in turn, and with drafts; mlx-lm's
BatchGenerator.
"""
NAMES = {BASE: "tandem", SAME: "one adapter", MIXED: "mixed", DRAFTS: "with drafts", PEER: "BatchGenerator"}
"""Names of the sides in tables."""

Rounds = dict[str, list[dict[str, float]]]
"""The figures of all rounds by side."""

_OVER = {
    "same/base": (SAME, BASE),
    "mixed/base": (MIXED, BASE),
    "mixed/same": (MIXED, SAME),
    "drafts/base": (DRAFTS, BASE),
}


def summary(rows: int, prompt_tokens: int, rounds: Rounds, floor: Floor, adapters: int) -> dict[str, Any]:
    """Return the results of one batch.

    Each side that ran has its medians, the bytes that its steps have to move, and the share of the copying bandwidth
    that it reached. Ratios are medians over neighbours in time; those of `decode` and `prefill` are tandem /
    BatchGenerator.
    """
    found: dict[str, Any] = {"batch": rows, "prompt_tokens": prompt_tokens}
    read = {SAME: min(adapters, 1), MIXED: min(adapters, rows)}
    for side, raw in rounds.items():
        if raw:
            medians = {field: round(statistics.median(r[field] for r in raw), 3) for field in raw[0]}
            context = prompt_tokens + medians["generated_before"]
            found[side] = medians | floor.of_step(rows, context, read.get(side, 0), medians["step_ms"])
    ratios = {kind: _ratio(rounds, f"{kind}_tokens_per_s", BASE, PEER) for kind in ("decode", "prefill")}
    ratios |= {name: _ratio(rounds, "decode_tokens_per_s", *sides) for name, sides in _OVER.items()}
    return found | {"ratio": {name: ratio for name, ratio in ratios.items() if ratio is not None}, "rounds": rounds}


def _ratio(rounds: Mapping[str, Sequence[Mapping[str, float]]], field: str, over: str, under: str) -> float | None:
    pairs = list(zip(rounds.get(over, ()), rounds.get(under, ()), strict=False))
    if not pairs:
        return None
    return round(statistics.median(a[field] / b[field] if b[field] else 0.0 for a, b in pairs), 3)


def ran(row: Mapping[str, Any]) -> list[str]:
    """Return the sides of which a batch has figures."""
    return [side for side in NAMES if side in row]


def label(row: Mapping[str, Any]) -> str:
    """Return a batch in words."""
    return f"{row['batch']} × {row['prompt_tokens']:,}"


def line(row: Mapping[str, Any]) -> str:
    """Return the tokens per second of a batch in one line, which is shown while other batches are measured."""
    return f"{label(row):>12}  " + "  ".join(
        f"{NAMES[side]} {row[side]['decode_tokens_per_s']:,.0f}" for side in ran(row)
    )
