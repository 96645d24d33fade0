"""Results that are written to their file from the first figure on, so that a measurement may be stopped at any time."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio import runners
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mlx_tandem.cli.bench.machine import describe

AGAIN_SECONDS = 0.01
"""Time after which a signal that came while an event loop was started or closed is looked at again."""


class Results:
    """The figures so far, in a file that says in `complete` whether they are all."""

    def __init__(self, file: Path | None, **about: Any):
        self._file = file
        self.found: dict[str, Any] = describe() | about

    def add(self, **found: Any) -> None:
        """Add figures and write the file."""
        self.found |= found
        self._write(complete=False)

    def finish(self, **found: Any) -> None:
        """Add figures and write the file as complete."""
        self.found |= found
        self._write(complete=True)

    def _write(self, *, complete: bool) -> None:
        if self._file:
            # It is imported here, since turns.py also imports this module with the packages of older trees.
            from mlx_tandem.cli.outputs import write_json

            write_json(self._file, self.found | {"complete": complete})


def stop_cleanly() -> None:
    """Let SIGTERM, which `timeout` sends, end the program like an exit, so that everything it has started ends with
    it.
    """
    signal.signal(signal.SIGTERM, _leave)


def _leave(signum: int, frame: FrameType | None) -> None:
    def leave() -> NoReturn:
        sys.exit(f"stopped by signal {signum}")

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        if not _is_in_runner(frame):
            leave()
        # A loop is being started or closed, and an exception would leave it half open.
        signal.signal(signal.SIGALRM, lambda _, later: _leave(signum, later))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        return
    loop.call_soon_threadsafe(leave)  # an exception raised here could look like a failure of a transport


def _is_in_runner(frame: FrameType | None) -> bool:
    """Return whether a frame, or one that called it, belongs to asyncio's runners."""
    while frame is not None:
        if frame.f_code.co_filename == runners.__file__:
            return True
        frame = frame.f_back
    return False
