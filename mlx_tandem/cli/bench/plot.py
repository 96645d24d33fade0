"""The picture of a `tandem bench serve`: throughput and request times of each mode by concurrency."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SUFFIXES = (".png", ".svg")
WIDTH = 0.8  # of a group of bars, the groups being 1 apart


class MissingLibrary(Exception):
    """Plots need a library that is not installed; the message says how to get it."""


def require() -> None:
    """Raise MissingLibrary unless plots can be drawn here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingLibrary("--plot needs matplotlib: pip install 'mlx-tandem[bench]'")


def plot(result: dict[str, Any], path: Path) -> None:
    """Write a PNG or an SVG file, as the name ends."""
    from matplotlib.figure import Figure

    rows = {(row["concurrency"], row["mode"]): row["median"] for row in result["results"]}
    levels = list(dict.fromkeys(c for c, _ in rows))
    modes = list(dict.fromkeys(mode for _, mode in rows))
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, mode in enumerate(modes):
        at = [n for n, level in enumerate(levels) if (level, mode) in rows]
        found = [rows[levels[n], mode] for n in at]
        places = [n + WIDTH * ((i + 0.5) / len(modes) - 0.5) for n in at]
        width = WIDTH / len(modes)
        bars = left.bar(places, [m["tokens_per_s"] for m in found], width, label=mode)
        color = bars.patches[0].get_facecolor()
        right.bar(places, [m["latency_ms"]["p99"] for m in found], width, color=color, alpha=0.35)
        right.bar(places, [m["latency_ms"]["p50"] for m in found], width, color=color)
    left.set_ylabel("tokens per second")
    right.set_ylabel("request latency, ms (pale: p99)")
    for axes in (left, right):
        axes.set_xticks(range(len(levels)), [str(level) for level in levels])
        axes.set_xlabel("requests at once")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, len(modes)), frameon=False
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    undated = {"Date": None} if path.suffix == ".svg" else None  # the same result is the same file
    figure.savefig(path, dpi=150, metadata=undated)
