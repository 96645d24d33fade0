"""The output of a server until it is ready: one line of progress, and above it warnings."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from mlx_tandem.cli.console import say
from mlx_tandem.log import log

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from mlx_tandem.engine.client.start_times import StartProgress


MORE_THAN_ALL = 1.001
"""End of the bar in shares of a start, which it never reaches: rich stops the clock of a bar that has reached its
end."""


class StageEvents:
    """Logs an event for each stage of a start, for programs that read the log as JSON."""

    def __init__(self) -> None:
        self._stage = ""

    def update(self, progress: StartProgress) -> None:
        """Log the stage if it is a new one."""
        if progress.stage != self._stage:
            self._stage = progress.stage
            log("starting", stage=progress.stage, elapsed_s=progress.elapsed_s, left_s=progress.left_s)


class StartUp(logging.Handler):
    """A progress line on a terminal, which `close` erases; elsewhere a plain line for each stage. Both say how long the
    start will still take by the last one.

    As a handler of the log it prints events as plain lines: on a terminal warnings and errors, elsewhere and if
    `verbose` all of them.
    """

    def __init__(self, verbose: bool):
        self._terminal = sys.stderr.isatty()
        super().__init__(logging.WARNING if self._terminal and not verbose else logging.NOTSET)
        self._verbose = verbose
        self._stage = ""
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def update(self, progress: StartProgress) -> None:
        """Show how far the start is."""
        if self._terminal:
            self._draw(progress)
        elif progress.stage != self._stage:
            left = _left(progress)
            say(f"{progress.stage} …" + (f" ({left})" if left else ""))
        self._stage = progress.stage

    def close(self) -> None:
        """Erase the progress line. A second call does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Print an event of the log as a plain line."""
        kind = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        fields = dict(getattr(record, "fields", {}))
        trace = fields.pop("trace", ())
        more = "".join(f", {name} {value}" for name, value in fields.items())
        say(f"{kind}{record.getMessage()}{more}")
        for line in trace if self._verbose else ():
            say(f"    {line}")

    def _draw(self, progress: StartProgress) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            # While the bar is there, rich prints above it what anything else writes to sys.stderr.
            texts = TextColumn("tandem: {task.description}"), TextColumn("{task.fields[left]}")
            columns = (texts[0], BarColumn(), TimeElapsedColumn(), texts[1])
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(progress.stage, total=MORE_THAN_ALL, left="")
            self._bar.start()
        self._bar.update(self._task, description=progress.stage, completed=_share(progress), left=_left(progress))


def _share(progress: StartProgress) -> float:
    """Return the share of the start that is done by the last start; without one, the share of its stage."""
    if progress.left_s is None:
        return progress.fraction
    return progress.elapsed_s / max(progress.elapsed_s + progress.left_s, 1e-3)


def _left(progress: StartProgress) -> str:
    """Return the time that is left in words; empty where it is not known."""
    if progress.left_s is None:
        return ""
    if progress.left_s < 1:
        return "nearly done"
    seconds = round(progress.left_s)
    return f"about {seconds} s left" if seconds < 120 else f"about {round(seconds / 60)} min left"
