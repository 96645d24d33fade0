"""The estimate of the time that is left of a measurement, in words for the user."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter


class Left:
    """An estimate of the time until all pieces of some work are done, from the time of the pieces that are done."""

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
