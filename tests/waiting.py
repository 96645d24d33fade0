"""Waiting for what can be observed."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object]) -> None:
    """Ask until it holds. That it takes a minute means that it never will."""
    deadline = time.monotonic() + 60
    pause = 0.002
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(pause)  # the server has the core meanwhile
        pause = min(2 * pause, 0.05)
