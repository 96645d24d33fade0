"""Writing in place: lines of the KV pool's arrays and of the adapters' slots.

MLX's own operations write an array in place when nothing else holds its data. On a CPU this can be arranged. On a GPU
the step in flight holds everything that it reads until it is done, so the next step's first write, which is queued
behind it, would copy the pool. There a kernel writes, to which the array is an input like any other. MLX does not know
of such a write, so later reads of the array have to be ordered after it by other means:

- CUDA runs the graphs of one stream one after the other. Within a graph, a read is ordered after the write only if it
  depends on an output of the writing kernel.
- Metal orders kernels only by their outputs, within a step and across steps. `Order` carries the outputs from one user
  of the arrays to the next (docs/decisions/metal-order.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, reduce
from operator import add
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model import backend
from mlx_tandem.model.kernel_checks import store as store_check
from mlx_tandem.model.kernel_checks.frame import Verdict
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.store import Store

log = logging.getLogger(__name__)


class Writing(NamedTuple):
    """The way in which arrays are written in place on this device."""

    store: Store | None
    """The kernel that writes; None where MLX's own operations do."""
    problem: str = ""
    """Why the device's kernel does not write; empty where it does or where there is none."""
    by_outputs: bool = False
    """Whether the device orders kernels by their outputs alone. Then every user of an array that kernels write has to
    depend on an output of each earlier user, which `Order` and `after` provide for."""


verdict = Verdict()
"""The result of the check of the device's kernel that writes."""


def given(problem: str | None) -> None:
    """Take the result of another process's test of the kernel, or forget it (None), so that it is tested here.

    Call it before anything is written.
    """
    verdict.give(problem)
    writing.cache_clear()


@cache
def writing() -> Writing:
    """Return how the default device writes. A kernel may be tested first, unless another process has done that."""
    here = backend.current().kernels
    if here.target is None:
        return Writing(None)
    make = dialect.maker(here.target)
    problem = verdict.reach(lambda: store_check.problem(make) if here.tested_to_write else "")
    if not problem:
        return Writing(Store(make), by_outputs=here.ordered_by_outputs)
    log.warning("MLX's own operations write the KV pool: the kernel that writes in place is %s", problem)
    return Writing(None, problem)


class Written(NamedTuple):
    """The result of a write.

    array: the array to use from now on instead of the old one. after: a zero [1] int32 to be added to the indices by
    which the array is read in the same step; None where no order is needed.
    """

    array: mx.array
    after: mx.array | None


def write(array: mx.array, rows: mx.array, lines: mx.array) -> Written:
    """Write array[rows] = lines. array: [lines, width]; rows: [n] int32; lines: [n, width] of the array's type."""
    store = writing().store
    if store is not None:
        return Written(array, store(array, rows, lines))
    array[rows] = lines
    return Written(array, None)


class Order:
    """The order of the users of arrays that kernels write, across the parts of steps.

    `zeros` holds a zero [1] int32 that depends on an output of every earlier user of the arrays, or nothing where the
    device keeps the order by itself. A user adds it to the indices by which it reads or writes, and then calls `follow`
    with the arrays that it made.
    """

    def __init__(self) -> None:
        self.zeros: list[mx.array] = []
        self.reset()

    def reset(self) -> None:
        """Begin again, when nothing is in flight."""
        self.zeros = [mx.zeros((1,), mx.int32)] if writing().by_outputs else []

    def follow(self, made: Sequence[mx.array]) -> None:
        """Order later users after the kernels that made these arrays, all of which depend on `zeros`.

        Without arrays there was no user: a pool of a model without attention has none.
        """
        if self.zeros and made:
            self.zeros = [zero_of(made)]

    def wait(self) -> None:
        """Wait until all earlier users of the arrays are done."""
        mx.eval(self.zeros)


def after(zeros: Sequence[mx.array], x: mx.array) -> mx.array:
    """Return x (int32 or a float type) plus these zeros [1], on which it then depends; x itself without zeros."""
    return reduce(add, [zero.astype(x.dtype) for zero in zeros], x)


def zero_of(arrays: Sequence[mx.array]) -> mx.array:
    """Return a zero [1] int32 that depends on each of these arrays."""
    return _zero([x[(slice(0, 1),) * x.ndim].reshape(1) for x in arrays])


@mx.compile  # compiled, a sum of hundreds is a few kernels
def _zero(numbers: list[mx.array]) -> mx.array:
    # No number is greater than itself, be it finite or not.
    return reduce(add, [(x > x).astype(mx.int32) for x in numbers])
