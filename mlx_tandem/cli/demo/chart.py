"""Draws a curve as text for a terminal, and as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def text(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return the lines of a bar chart of the newest `width` of the values, which are in 0 … 1."""
    shown = values[-width:]
    lines = []
    for row in reversed(range(height)):
        filled = [min(max(value * height - row, 0.0), 1.0) for value in shown]
        lines.append("".join(_EIGHTHS[round(share * 8)] for share in filled).ljust(width))
    return lines


def svg(values: Sequence[float], *, title: str, below: str) -> str:
    """Return an SVG with a line of values in 0 … 1, in colours that are visible on a light and a dark page."""
    width, height, left, top = 720, 300, 48, 40
    across = (width - left - 20) / max(len(values) - 1, 1)
    down = height - top - 50
    points = " ".join(f"{left + i * across:.1f},{top + (1 - v) * down:.1f}" for i, v in enumerate(values))
    grid = "".join(
        f'<line x1="{left}" x2="{width - 20}" y1="{top + (1 - v) * down:.1f}" y2="{top + (1 - v) * down:.1f}"/>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    )
    labels = "".join(
        f'<text x="{left - 8}" y="{top + (1 - v) * down + 4:.1f}" text-anchor="end">{v:g}</text>' for v in (0, 0.5, 1)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#888"><text x="{left}" y="22" font-size="15">{escape(title)}</text>'
        f'<g stroke="#8884">{grid}</g>{labels}'
        f'<polyline fill="none" stroke="#2a8" stroke-width="2.5" points="{points}"/>'
        f'<text x="{left}" y="{height - 26}">update 1 … {len(values)}</text>'
        f'<text x="{left}" y="{height - 8}">{escape(below)}</text></svg>\n'
    )
