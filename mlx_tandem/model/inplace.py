"""Writing lines of the pool's arrays where they lie.

MLX writes an array in place when nobody else holds its data. On a CPU that can be had. On CUDA the step in flight holds
all that it reads until it is done, so that the next step's first write, which is queued behind it, would copy the pool.
There a kernel writes, to which the array is an input like any other.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.store import Store


def write(array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
    """array[rows] = lines, for array [lines, width], rows [n] int32 and lines [n, width] of array's type. What reads
    the result reads what was written; the array itself must not be used any more."""
    store = _store()
    if store is not None:
        return store(array, rows, lines)
    array[rows] = lines
    return array


@cache
def _store() -> Store | None:
    return Store(dialect.maker("cuda")) if "cuda" in dialect.available() else None
