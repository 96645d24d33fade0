"""Waiting for what can be observed."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object]) -> None:
    """Ask until it holds. That it takes a minute means that it never will."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.005)  # the server has the core meanwhile
