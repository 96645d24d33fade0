"""The kernel that writes lines in place beside numpy on this device: whether it is right, and not far slower than MLX's
own operation."""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.store import Store
from mlx_tandem.model.trials import machine

log = logging.getLogger(__name__)

Write = Callable[[mx.array, mx.array, mx.array], mx.array]
"""array[rows] = lines; what is evaluated for that."""

TYPES = (mx.float32, mx.float16, mx.bfloat16, mx.uint32)
"""Of the arrays that are written: the models' own, and the words of a pool of few bits."""

ARRAY, LINES = (2048, 128), 128
"""Of what is timed: lines and width of the array, and how many are written."""

MOST = 4.0
"""Times as long as MLX's operation the kernel may take: without it the pool is copied, or steps wait for each other."""


def problem(make: Make) -> str:
    """Return what is wrong with the kernel as `make` makes it; empty: nothing."""
    try:
        store = Store(make)
        for dtype in TYPES:
            if not _is_right(store, dtype):
                return f"wrong in {dtype}"
        ours, theirs = _seconds(store), _seconds(_scatter)
    except Exception as e:  # whatever a compiler or a driver says
        log.warning("the kernel that writes in place failed its check", exc_info=True)
        return f"not to be had: {type(e).__name__}: {e}".strip()[:500]
    if ours > MOST * theirs:
        return f"slower: {ours * 1e6:.0f} µs for {LINES} lines, MLX's operation takes {theirs * 1e6:.0f}"
    return ""


def _is_right(store: Store, dtype: mx.Dtype) -> bool:
    """Whether all lines are where they belong, and no other line has changed."""
    rng = np.random.default_rng(0)
    array, lines = (mx.array(rng.integers(0, 99, (n, 24))).astype(dtype) for n in (300, 123))
    rows = rng.permutation(300)[:123].astype(np.int32)
    mx.eval(array, lines)
    want = np.array(array.astype(mx.float32))
    want[rows] = np.array(lines.astype(mx.float32))
    done = store(array, mx.array(rows), lines)
    mx.eval(done)  # what reads the array by itself is not ordered behind the kernel
    return bool(done.item() == 0 and np.array_equal(np.array(array.astype(mx.float32)), want))


def _scatter(array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
    array[rows] = lines
    return array


def _seconds(write: Write) -> float:
    array, lines = mx.zeros(ARRAY), mx.ones((LINES, ARRAY[1]))
    rows = mx.arange(LINES, dtype=mx.int32)
    mx.eval(array, lines, rows)
    return machine.seconds(lambda: [write(array[:], rows, lines)])
