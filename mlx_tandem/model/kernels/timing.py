"""Measurements of the device by itself: errors of products and compiled functions, copy bandwidth, duration of work."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_tandem.model import backend


def product_error() -> float:
    """Return the error of a float32 product on the device against float64 on the host, relative to its largest
    number.
    """
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((192, 192)).astype(np.float32) for _ in range(2))
    expected = a.astype(np.float64) @ b
    return float(np.abs(np.array(mx.array(a) @ mx.array(b)) - expected).max() / np.abs(expected).max())


def compiled_error() -> float:
    """Return the largest difference between a compiled function and the same operations run one by one."""

    def function(x: mx.array) -> mx.array:
        return mx.sigmoid(x) * x + mx.sin(x * 3.0) / (1.0 + mx.abs(x))

    x = mx.array(np.linspace(-9, 9, 4096, dtype=np.float32))
    return float(mx.abs(mx.compile(function)(x) - function(x)).max())


_COPIES = 8
"""Copies in a row, so that the time to start the first counts for little."""


def copy_bandwidth() -> float:
    """Return the bytes per second that are read and written when an array is copied, the best of a few runs."""
    source = mx.zeros((backend.current().measuring.copied_numbers,), mx.float32)
    mx.eval(source)
    times = []
    for _ in range(4):
        started = time.perf_counter()
        copy = source
        for _ in range(_COPIES):
            copy = copy + 1.0
        mx.eval(copy)
        times.append(time.perf_counter() - started)
    return _COPIES * 2 * source.nbytes / min(times[1:])


_LONG_ENOUGH = 0.05
"""Total seconds of runs after which the duration of `work` is known well enough."""


def seconds(work: Callable[[], list[mx.array]], several: int = 4) -> float:
    """Return the duration of one call of `work` in seconds, the best of up to four runs.

    Each run makes `several` calls in a row, which keeps the device busy. Long work is run fewer than four times.
    """
    mx.eval(work())
    times: list[float] = []
    while len(times) < 4 and sum(times) < _LONG_ENOUGH:
        started = time.perf_counter()
        mx.eval([work() for _ in range(several)])
        times.append(time.perf_counter() - started)
    return min(times) / several
