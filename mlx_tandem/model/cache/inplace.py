"""Writing lines of arrays where they lie: those of the KV pool and of the adapters' slots.

MLX's own operations write an array in place when nobody else holds its data. On a CPU that can be had. On a GPU the
step in flight holds all that it reads until it is done, so that the next step's first write, which is queued behind it,
would copy the pool. There a kernel writes, to which the array is an input like any other. MLX knows nothing of such a
write, and what reads the array afterwards has to be ordered behind it by other means:

- CUDA runs the graphs of one stream one after the other. Within a graph only an output of the writing kernel orders
  what reads the array behind it.
- Metal orders only what takes an output behind what made that output, within a step and across steps. `Order` carries
  the outputs from one user of the arrays to the next (docs/decisions/metal-order.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, reduce
from operator import add
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernel_checks import store as store_check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.store import Store

log = logging.getLogger(__name__)


class Writing(NamedTuple):
    """How arrays are written in place on this device."""

    store: Store | None
    """The kernel that writes; None where MLX's own operations do."""
    by_outputs: bool = False
    """Whether the device orders kernels by their outputs alone. Then every user of an array that kernels write must be
    made of an output of each earlier user, for which `Order` and `after` are there."""


@cache
def writing() -> Writing:
    """Return what writes on the default device. On Metal, where the kernel was never run, it is tried first."""
    for target in dialect.available():
        make = dialect.maker(target)
        problem = store_check.problem(make) if target == "metal" else ""
        if not problem:
            return Writing(Store(make), by_outputs=target == "metal")
        log.warning("MLX's own operations write the KV pool: the kernel that writes in place is %s", problem)
    return Writing(None)


class Written(NamedTuple):
    """The array to go on with, the old one must not be used any more; and a zero [1] int32 to which the indices have to
    be added with which it is read in the same step, None where it can be read in any way.
    """

    array: mx.array
    after: mx.array | None


def write(array: mx.array, rows: mx.array, lines: mx.array) -> Written:
    """Write array[rows] = lines, for array [lines, width], rows [n] int32 and lines [n, width] of array's type."""
    store = writing().store
    if store is not None:
        return Written(array, store(array, rows, lines))
    array[rows] = lines
    return Written(array, None)


class Order:
    """The order of those who use arrays that kernels write, across the parts of steps.

    `zeros` holds a zero [1] int32 that is made of an output of everything that has used the arrays so far, or nothing
    where the device keeps that order by itself. A user adds it to the indices by which it reads or writes, and calls
    `follow` afterwards with what it made.
    """

    def __init__(self) -> None:
        self.zeros: list[mx.array] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew, when nothing is in flight."""
        self.zeros = [mx.zeros((1,), mx.int32)] if writing().by_outputs else []

    def follow(self, made: Sequence[mx.array]) -> None:
        """Order what comes next behind what made these arrays, all of which are made of `zeros`."""
        if self.zeros:
            self.zeros = [zero_of(made)]

    def wait(self) -> None:
        """Wait until everything that has used the arrays is done."""
        mx.eval(self.zeros)


def after(zeros: Sequence[mx.array], x: mx.array) -> mx.array:
    """Return x, int32 or of a float type, made of these zeros [1]: x itself where there are none."""
    return reduce(add, [zero.astype(x.dtype) for zero in zeros], x)


def zero_of(arrays: Sequence[mx.array]) -> mx.array:
    """Return a zero [1] int32 that is made of each of these arrays."""
    return _zero([x[(slice(0, 1),) * x.ndim].reshape(1) for x in arrays])


@mx.compile  # a sum of hundreds is a few kernels then
def _zero(numbers: list[mx.array]) -> mx.array:
    # No number is greater than itself, be it finite or not.
    return reduce(add, [(x > x).astype(mx.int32) for x in numbers])
