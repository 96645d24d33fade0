"""`tandem demo learn`: shows the built-in model learning the skill it is weak at while other requests are served."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mlx_tandem.cli.console import output
from mlx_tandem.cli.demo import chart, traffic
from mlx_tandem.cli.demo.learner import POLICY, SETTINGS, SKILL, Curve, Learner, TeachingError
from mlx_tandem.cli.outputs import write
from mlx_tandem.cli.own_server import ROOM, started_server
from mlx_tandem.files import StorageError
from mlx_tandem.http_client import HttpError, once

PROBE = SKILL.format("5 3 9 1 7")
"""Question whose answer is shown for each version."""

REFRESH_SECONDS = 0.15
"""Seconds between two updates of the screen."""


AXIS = "{:4.2f} │"
"""Text to the left of a row of the chart."""

ROWS = 8
"""Rows of the chart."""

LEAST_WIDTH = 20
"""Fewest columns of the chart, which has as many as there are updates if the terminal is wide enough."""


@dataclass
class View:
    """The contents of the screen, for rich to draw."""

    steps: int
    curve: Curve = field(default_factory=Curve)
    traffic: traffic.Traffic = field(default_factory=traffic.Traffic)
    status: dict[str, Any] = field(default_factory=dict)
    answers: list[tuple[int, str]] = field(default_factory=list)  # (version, answer to the probe) where it changed

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rewards = self.curve.rewards
        width = min(max(self.steps, LEAST_WIDTH), options.max_width - len(AXIS.format(1.0)))
        rows = chart.text(rewards, width=width, height=ROWS)
        yield Text("mean reward", style="bold")
        for i, row in enumerate(rows):
            yield Text.assemble(AXIS.format(1 - i / ROWS), (row, "green"))
        yield Text(f"     └{'─' * width}")
        yield Text(f"      update {len(rewards)} of {self.steps}\n")
        facts = Table.grid(padding=(0, 3))
        now = f"{rewards[-1]:.2f}" if rewards else "–"
        facts.add_row("reward", f"{now}   version {self.status.get('version', 0)} serves")
        beside = self.traffic
        facts.add_row("beside it", f"{beside.answers} answers, {beside.tokens:,} tokens, {beside.errors} errors")
        facts.add_row(
            "their tokens", f"p50 {beside.percentile(0.5):.1f} ms apart, p95 {beside.percentile(0.95):.1f} ms"
        )
        for version, answer in self.answers[-4:]:
            facts.add_row(f"{POLICY}@{version}" if version else "base", f"{PROBE}  →  {answer}")
        yield facts


def learn(steps: int, seed: int, streams: int, plot: Path) -> None:
    """Run the demo live on a terminal, or as a line per update elsewhere; save the curve as an SVG file.

    `streams` streams of other requests run beside it.
    """
    console = output()
    view = View(steps)
    with tempfile.TemporaryDirectory(prefix="tandem-learn-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        settings.write_text(
            yaml.safe_dump(
                {
                    "rl_training": SETTINGS | {"seed": seed},
                    "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 20},
                }
            ),
            encoding="utf-8",
        )
        with started_server(*ROOM, "--config", str(settings)) as url:
            try:
                if console.is_terminal:
                    with Live(console=console, refresh_per_second=8) as live:
                        asyncio.run(_teach(url, view, seed, streams, lambda: live.update(view)))
                else:
                    asyncio.run(_teach(url, view, seed, streams, _Lines(view)))
            except (TeachingError, HttpError) as e:
                raise SystemExit(f"tandem: {e}") from None
    first, last = view.curve.first(), view.curve.last()
    seconds = view.curve.steps[-1].seconds
    said = f"mean reward {first:.2f} → {last:.2f} in {len(view.curve.steps)} updates and {seconds:.0f} s"
    beside = f"{view.traffic.answers} answers to others meanwhile, {view.traffic.errors} errors"
    drawn = chart.svg(view.curve.rewards, title=f"{SKILL.format('…')}: {said}", below=beside)
    try:
        write(plot, drawn.encode())
        where = f" The curve: {plot}"
    except StorageError as e:
        where = f" The curve is not saved: {e.message}"
    console.print(f"{said}; {beside}.{where}", soft_wrap=not console.is_terminal, highlight=False)


class _Lines:
    """Prints a line for each update."""

    def __init__(self, view: View):
        self._view = view
        self._said = 0

    def __call__(self) -> None:
        for i, step in enumerate(self._view.curve.steps[self._said :], self._said + 1):
            print(f"update {i}  reward {step.reward:.2f}  version {step.version}  {step.seconds:.0f} s", flush=True)
        self._said = len(self._view.curve.steps)


async def _teach(url: str, view: View, seed: int, streams: int, update: Callable[[], None]) -> None:
    learner = Learner(url, seed=seed)
    view.curve = learner.curve
    # The base answers first: the policy's first version says the same, and an answer is shown where it changes.
    await _probe(url, view, "base", 0)
    beside = [
        asyncio.create_task(traffic.run(url, view.traffic, streams)),
        asyncio.create_task(_watch(url, view, update)),
    ]
    try:
        await learner.learn(view.steps)
        await _refresh(url, view)
    finally:
        for task in beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    update()


async def _watch(url: str, view: View, update: Callable[[], None]) -> None:
    while True:
        await _refresh(url, view)
        update()
        await asyncio.sleep(REFRESH_SECONDS)


async def _refresh(url: str, view: View) -> None:
    """Fetch the server's status, and the policy's answer to the probe if it has a new version."""
    with contextlib.suppress(HttpError):
        status, found = await once(url, "GET", "/v1/training/status")
        if status == 200:
            before, view.status = view.status.get("version", 0), found
            if found["version"] != before:
                await _probe(url, view, POLICY, found["version"])


async def _probe(url: str, view: View, model: str, version: int) -> None:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROBE}],
        "temperature": 0.0,
        "max_tokens": 24,
    }
    status, reply = await once(url, "POST", "/v1/chat/completions", body)
    if status == 200:
        answer = reply["choices"][0]["message"]["content"]
        if not view.answers or view.answers[-1][1] != answer:
            view.answers.append((version, answer))
