"""The output of a server until it is ready: one line of progress, and above it warnings."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from mlx_tandem.cli.console import say

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from mlx_tandem.engine.messages import Progress


MORE_THAN_ALL = 1.001
"""End of the bar in shares of a stage, which it never reaches: rich stops the clock of a bar that has reached its
end."""


class StartUp(logging.Handler):
    """A progress line on a terminal, which `close` erases; elsewhere a plain line for each stage.

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

    def update(self, progress: Progress) -> None:
        """Show how far the present stage is."""
        if self._terminal:
            self._draw(progress)
        elif progress.stage != self._stage:
            say(f"{progress.stage} …")
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

    def _draw(self, progress: Progress) -> None:
        if self._bar is None or self._task is None:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            # While the bar is there, rich prints above it what anything else writes to sys.stderr.
            columns = (TextColumn("tandem: {task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(progress.stage, total=MORE_THAN_ALL)
            self._bar.start()
        self._bar.update(self._task, description=progress.stage, completed=progress.fraction)
