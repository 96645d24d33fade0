"""How much of a measurement is left, in words for people who wait for it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


class Left:
    """Estimates the time until all of several pieces of work are done from those that are."""

    def __init__(self, pieces: int, clock: Callable[[], float] = perf_counter):
        """Begin with `pieces` pieces of work to do. `clock` returns seconds."""
        self._pieces, self._done = pieces, 0
        self._clock, self._began = clock, clock()

    def after(self, pieces: int = 1) -> str:
        """Count pieces that were done; return "about 2:05 left", or "done"."""
        self._done += pieces
        if self._done >= self._pieces:
            return "done"
        each = (self._clock() - self._began) / max(self._done, 1)
        minutes, seconds = divmod(round(each * (self._pieces - self._done)), 60)
        return f"about {minutes}:{seconds:02d} left"
