"""Writing lines of the pool's arrays where they lie.

MLX writes an array in place when nobody else holds its data. On a CPU that can be had. On CUDA the step in flight holds
all that it reads until it is done, so that the next step's first write, which is queued behind it, would copy the pool.
There a kernel writes, to which the array is an input like any other: within a step, nothing orders what reads the array
behind it but an output of the kernel.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.store import Store


class Written(NamedTuple):
    """The array to go on with, the old one must not be used any more; and a zero [1] int32 to which the indices have to
    be added with which it is read in the same step, None where it can be read in any way."""

    array: mx.array
    after: mx.array | None


def write(array: mx.array, rows: mx.array, lines: mx.array) -> Written:
    """array[rows] = lines, for array [lines, width], rows [n] int32 and lines [n, width] of array's type."""
    store = by_kernel()
    if store is not None:
        return Written(array, store(array, rows, lines))
    array[rows] = lines
    return Written(array, None)


@cache
def by_kernel() -> Store | None:
    """What writes on this device, where MLX itself would copy."""
    return Store(dialect.maker("cuda")) if "cuda" in dialect.available() else None
