"""Results that are in their file from the first finding on: a measurement may be stopped at any time."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.serve import write


class Results:
    """What was found so far, in the file, which says in `complete` whether it is all."""

    def __init__(self, file: Path | None, **about: Any):
        self._file = file
        self.found: dict[str, Any] = describe() | about

    def add(self, **found: Any) -> None:
        self.found |= found
        self._write(complete=False)

    def finish(self, **found: Any) -> None:
        self.found |= found
        self._write(complete=True)

    def _write(self, *, complete: bool) -> None:
        if self._file:
            write(self._file, self.found | {"complete": complete})


def stop_cleanly() -> None:
    """SIGTERM, which `timeout` sends, ends the program as an exit does: what it has started ends with it."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(signum: int, frame: object) -> None:
    def leave() -> NoReturn:
        sys.exit(f"stopped by signal {signum}")

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        leave()
    loop.call_soon_threadsafe(leave)  # raised here, it might be taken for a failure of the transport that is read
