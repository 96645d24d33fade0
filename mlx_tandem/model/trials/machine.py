"""The device by itself: whether it computes, whether compiled functions do, how fast it copies, how long work takes."""

from __future__ import annotations

import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_tandem.model.device import is_cpu


def product_error() -> float:
    """Of a float32 product on the device beside float64 on the host, of its largest number."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((192, 192)).astype(np.float32) for _ in range(2))
    expected = a.astype(np.float64) @ b
    return float(np.abs(np.array(mx.array(a) @ mx.array(b)) - expected).max() / np.abs(expected).max())


def compiled_error() -> float:
    """Of a fused function beside the same operations one by one."""

    def function(x: mx.array) -> mx.array:
        return mx.sigmoid(x) * x + mx.sin(x * 3.0) / (1.0 + mx.abs(x))

    x = mx.array(np.linspace(-9, 9, 4096, dtype=np.float32))
    return float(mx.abs(mx.compile(function)(x) - function(x)).max())


_COPIES = 8
"""One behind the other, so that starting the first, which is not copying, counts for little."""


def copy_bandwidth() -> float:
    """Bytes a second that are read and written when an array is copied, the best of a few times."""
    source = mx.zeros(((8 << 20) if is_cpu() else (128 << 20),), mx.float32)
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
"""Seconds of work whose time is known well enough."""


def seconds(work: Callable[[], list[mx.array]], several: int = 4) -> float:
    """Of one of several in a row, so that the device is kept busy; the best of a few, fewer where that takes long."""
    mx.eval(work())
    times: list[float] = []
    while len(times) < 4 and sum(times) < _LONG_ENOUGH:
        started = time.perf_counter()
        mx.eval([work() for _ in range(several)])
        times.append(time.perf_counter() - started)
    return min(times) / several
