"""Record `tandem demo` as an animated SVG of a real run of a real server.

python scripts/record_demo.py [docs/demo.svg]
"""

from __future__ import annotations

import asyncio
import io
import sys
from html import escape
from pathlib import Path
from time import perf_counter

from rich.cells import cell_len
from rich.console import Console

from mlx_tandem.cli.demo.answers import Board, ask, places, summary
from mlx_tandem.cli.own_server import ROOM, started_server

WIDTH = 80
FRAMES_PER_SECOND = 6
WARM_SECONDS = 3.0
"""Seconds of the demo before what is recorded: a server's first steps of each kind take longer than all later ones."""

HOLD_SECONDS = 4.0
"""Seconds for which the last frame stays."""

CELL_WIDTH, LINE_HEIGHT, MARGIN = 7.8, 17, 14


def record(seconds: float) -> list[tuple[float, str]]:
    """Run the demo and return (seconds since the start, contents of the screen) for each change."""
    frames: list[tuple[float, str]] = []
    start = perf_counter()

    def update(board: Board) -> None:
        now = perf_counter() - start
        if frames and now - frames[-1][0] < 1 / FRAMES_PER_SECOND:
            return
        screen = draw(board)
        if not frames or frames[-1][1] != screen:
            frames.append((now, screen))

    with started_server(*ROOM) as url:
        asyncio.run(ask(url, WARM_SECONDS, places(), lambda board: None))
        start = perf_counter()
        board = asyncio.run(ask(url, seconds, places(), update))
        frames.append((perf_counter() - start, draw(board, asyncio.run(summary(url, board)))))
    return frames


def draw(board: Board, below: str = "") -> str:
    """Return the contents of the screen, with a line `below` the answers."""
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)
    console.print(board.drawn(), below, sep="\n")
    assert isinstance(console.file, io.StringIO)
    return "\n".join(["$ tandem demo", *(line.rstrip() for line in console.file.getvalue().rstrip().split("\n"))])


def svg(frames: list[tuple[float, str]]) -> str:
    """Return one picture per frame, shown in turn by style rules that every browser runs.

    It begins with the last frame, which is the full one, for a while. That one is also what a viewer shows that does
    not animate. Each line is as wide as its characters' cells in any font, and none is wider than the picture.
    """
    frames = [(0.0, frames[-1][1]), *((HOLD_SECONDS + begin, screen) for begin, screen in frames[:-1])]
    total = frames[-1][0] + 1 / FRAMES_PER_SECOND
    lines = max(screen.count("\n") + 1 for _, screen in frames)
    columns = max(cell_len(line) for _, screen in frames for line in screen.split("\n"))
    width, height = columns * CELL_WIDTH + 2 * MARGIN, lines * LINE_HEIGHT + 2 * MARGIN
    rules, groups = [], []
    for i, (begin, screen) in enumerate(frames):
        end = frames[i + 1][0] if i + 1 < len(frames) else total
        a, b = 100 * begin / total, 100 * end / total
        before = f"0%,{a:.3f}%{{visibility:hidden}}" if i else ""
        after = f"{b:.3f}%,100%{{visibility:hidden}}" if i + 1 < len(frames) else "100%{visibility:visible}"
        rules.append(f"@keyframes f{i}{{{before}{a:.3f}%,{max(a, b - 0.001):.3f}%{{visibility:visible}}{after}}}")
        rules.append(f"#f{i}{{animation:f{i} {total:.2f}s step-end infinite}}")
        text = "".join(
            f'<text x="{MARGIN}" y="{MARGIN + (n + 0.8) * LINE_HEIGHT:.0f}" '
            f'textLength="{cell_len(line) * CELL_WIDTH:.1f}">{escape(line)}</text>'
            for n, line in enumerate(screen.split("\n"))
            if line.strip()
        )
        hidden = ' visibility="hidden"' if i else ""
        groups.append(f'<g id="f{i}"{hidden}>{text}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:.0f} {height:.0f}" '
        'role="img" '
        'aria-label="A recording of tandem demo: the base and its adapters answer the same questions in one batch">'
        "<style>text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#d8dee9;white-space:pre}"
        f"{''.join(rules)}"
        "@media (prefers-reduced-motion:reduce){g{animation:none!important}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#1d2129"/>{"".join(groups)}</svg>\n'
    )


def main() -> None:
    """Write the recording."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/demo.svg")
    frames = record(seconds=6.0)
    out.write_text(svg(frames), encoding="utf-8")
    print(f"{out}: {len(frames)} frames, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
