"""Draws the results of `tandem bench serve` and `tandem bench engine`.

The first has throughput and request times of each mode by concurrency; the second has throughput and steps of each
side by batch.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_tandem.cli.bench.sides import NAMES, label
from mlx_tandem.cli.outputs import write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 0.8
"""Width of a group of bars, where the distance of groups is 1."""


def plot(result: dict[str, Any], path: Path) -> None:
    """Write the result of `tandem bench serve` as a PNG or SVG file, by the suffix of `path`."""
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
    _finish(figure, left, right, [str(level) for level in levels], "requests at once", path)


def plot_engine(result: dict[str, Any], path: Path) -> None:
    """Write the result of `tandem bench engine` as a picture. A line over a bar is the least time that a step could
    take.
    """
    from matplotlib.figure import Figure

    rows = result["results"]
    sides = [side for side in NAMES if any(side in row for row in rows)]
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    width = WIDTH / len(sides)
    for i, side in enumerate(sides):
        found = [(n + WIDTH * ((i + 0.5) / len(sides) - 0.5), row[side]) for n, row in enumerate(rows) if side in row]
        places = [place for place, _ in found]
        bars = left.bar(places, [m["decode_tokens_per_s"] for _, m in found], width, label=NAMES[side])
        right.bar(places, [m["step_ms"] for _, m in found], width, color=bars.patches[0].get_facecolor())
        ends = [place - width / 2 for place in places], [place + width / 2 for place in places]
        right.hlines([m["floor_ms"] for _, m in found], *ends, colors="black", linewidth=1)
    left.set_ylabel("decoded tokens per second")
    right.set_ylabel("ms per step (line: bytes over bandwidth)")
    _finish(figure, left, right, [label(row) for row in rows], "sequences × tokens of a prompt", path)


def _finish(figure: Figure, left: Axes, right: Axes, ticks: list[str], below: str, path: Path) -> None:
    for axes in (left, right):
        axes.set_xticks(range(len(ticks)), ticks)
        axes.set_xlabel(below)
        axes.spines[["top", "right"]].set_visible(False)
    handles = left.get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=min(4, len(handles[0])), frameon=False)
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG or SVG file, by the suffix of `path`. Raise StorageError."""
    undated = {"Date": None} if path.suffix == ".svg" else None  # so that equal results give equal files
    drawn = io.BytesIO()
    figure.savefig(drawn, format=path.suffix[1:], dpi=150, metadata=undated)
    write(path, drawn.getvalue())
