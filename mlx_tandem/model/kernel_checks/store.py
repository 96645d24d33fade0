"""Check of the kernel that writes lines of an array in place: it must agree with numpy and not be far slower than
MLX.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernel_checks import machine
from mlx_tandem.model.kernel_checks.frame import Rejected, checked
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.store import Store

Write = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Function that sets array[rows] = lines and returns what has to be evaluated for it."""

TYPES = (mx.float32, mx.float16, mx.bfloat16, mx.uint32)
"""Types of the arrays that are written: the models' own, and the words of a pool that holds few bits per number."""

ARRAY, LINES = (2048, 128), 128
"""Lines and width of the array in the timed call, and the number of lines that it writes."""

MOST = 4.0
"""Longest time of the kernel as a multiple of the time of MLX's operation. Without the kernel the pool is copied, or
steps wait for each other, which costs more."""


def problem(make: Make) -> str:
    """Return why kernels made by `make` cannot be used; empty if they can."""

    def check() -> str:
        store = Store(make)
        for dtype in TYPES:
            if not _is_right(store, dtype):
                raise Rejected(f"wrong in {dtype}")
        ours, theirs = _seconds(store), _seconds(_scatter)
        if ours > MOST * theirs:
            raise Rejected(f"slower: {ours * 1e6:.0f} µs for {LINES} lines, MLX's operation takes {theirs * 1e6:.0f}")
        return ""

    return checked("the kernel that writes in place", check, lambda reason: reason)


def _is_right(store: Store, dtype: mx.Dtype) -> bool:
    """Return whether every line is written to its place and no other line has changed."""
    rng = np.random.default_rng(0)
    array, lines = (mx.array(rng.integers(0, 99, (n, 24))).astype(dtype) for n in (300, 123))
    rows = rng.permutation(300)[:123].astype(np.int32)
    mx.eval(array, lines)
    want = np.array(array.astype(mx.float32))
    want[rows] = np.array(lines.astype(mx.float32))
    done = store(array, mx.array(rows), lines)
    mx.eval(done)  # MLX does not order a read of the array behind the kernel's write
    return bool(done.item() == 0 and np.array_equal(np.array(array.astype(mx.float32)), want))


def _scatter(array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
    array[rows] = lines
    return array


def _seconds(write: Write) -> float:
    """Return the seconds of one call that writes LINES lines."""
    array, lines = mx.zeros(ARRAY), mx.ones((LINES, ARRAY[1]))
    rows = mx.arange(LINES, dtype=mx.int32)
    mx.eval(array, lines, rows)
    return machine.seconds(lambda: [write(array[:], rows, lines)])
