"""Kernels that measure how long the device takes for what runs between them, by its own clock. For CUDA only."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernels.dialect import Make, Source

_SECOND = 10**9
"""Nanoseconds of a second."""

_TELL = """
  time[0] = int(now / 1000000000ll);
  time[1] = int(now % 1000000000ll);
"""

_START = (
    """
  const long long first = NANOSECONDS();
  long long now = first;
  while (now - first < 1000ll * MICROSECONDS) now = NANOSECONDS();
  zero[0] = T(0.0f);
"""
    + _TELL
)

_STOP = "  const long long now = NANOSECONDS();\n  (void)x;\n" + _TELL


class Stopwatch:
    """A stopwatch on the device."""

    def __init__(self, make: Make):
        self._start = make(Source("start_stopwatch", ["nothing"], ["zero", "time"], _START))
        self._stop = make(Source("stop_stopwatch", ["x"], ["time"], _STOP))

    def start(self, dtype: mx.Dtype, microseconds: int) -> tuple[mx.array, mx.array]:
        """Wait on the device, then return a zero [1, 1] of a type and the time [2], int32: seconds and nanoseconds.

        Operations that depend on the zero run after the wait. The host can launch them meanwhile.
        """
        zero, time = self._start(
            [mx.zeros((8,), mx.int32)],
            {"T": dtype, "MICROSECONDS": microseconds},
            (1, 1, 1),
            1,
            [((1, 1), dtype), ((2,), mx.int32)],
        )
        return zero, time

    def stop(self, x: mx.array) -> mx.array:
        """Return the time when x has been computed."""
        (time,) = self._stop([x], {}, (1, 1, 1), 1, [((2,), mx.int32)])
        return time


def seconds_between(start: mx.array, stop: mx.array) -> float:
    """Return the seconds between two times of a stopwatch."""
    seconds, nanoseconds = np.array(stop) - np.array(start)
    return float(seconds + nanoseconds / _SECOND)
