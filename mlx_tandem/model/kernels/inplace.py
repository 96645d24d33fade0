"""Writing in place: lines of the KV pool's arrays and of the adapters' slots.

MLX's own operations write an array in place when nothing else holds its data. On a CPU this can be arranged. On a GPU
the step in flight holds everything that it reads until it is done, so the next step's first write, which is queued
behind it, would copy the pool. There a kernel writes, to which the array is an input like any other. MLX does not know
of such a write, so later reads of the array have to be ordered after it by other means:

- CUDA runs the graphs of one stream one after the other. Within a graph, a read is ordered after the write only if it
  depends on an output of the writing kernel.
- Metal orders kernels only by their outputs, within a step and across steps. `Order` carries the outputs from one user
  of the arrays to the next (docs/decisions/metal-order.md).

The kernel is checked at start on Metal: it must agree with numpy and not be far slower than MLX.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, reduce
from operator import add
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.model import backend
from mlx_tandem.model.kernels import checking, dialect
from mlx_tandem.model.kernels.checking import Rejected, Verdict, checked
from mlx_tandem.model.kernels.dialect import Constant, Make, Source

log = logging.getLogger(__name__)

# --- The kernel ------------------------------------------------------------------------------------------------------

_THREADS = 256

_RUN_BYTES = 16

_FUNCTIONS = r"""
template <typename T, int n>
struct alignas(n * sizeof(T)) Run {
  T at[n];
};
"""

# A group of neighbouring threads writes a line, 16 bytes each. A group is as wide as a line needs, from one thread
# to a whole block, so that a block writes many lines of a few bytes or a part of a line of megabytes. The line and the
# place in it come from the grid: 64-bit divisions take long on Apple's GPUs. RUN is the number of elements that a
# thread writes. A run is read one element at a time, because `lines` may begin anywhere in its memory, while each line
# of the array begins at a multiple of a run.
_BODY = r"""
  const int width = lines_shape[1], runs = width / RUN;
  int shift = 0;
  while ((1 << shift) < min(runs, THREADS)) shift++;
  const int line = GROUP_X * (THREADS >> shift) + (THREAD >> shift);
  const int run = (GROUP_Y << shift) + (THREAD & ((1 << shift) - 1));
  if (line < lines_shape[0] && run < runs) {
    const size_t from = (size_t)line * width + run * RUN;
    Run<T, RUN> all;
    UNROLL
    for (int i = 0; i < RUN; i++) all.at[i] = lines[from + i];
    *(GLOBAL Run<T, RUN>*)((GLOBAL T*)array + (size_t)rows[line] * width + run * RUN) = all;
  }
  if (GROUP_X == 0 && GROUP_Y == 0 && THREAD == 0) done[0] = 0;
"""


class Store:
    """The kernel for one target."""

    def __init__(self, make: Make):
        self._kernel = make(Source("store", ["array", "rows", "lines"], ["done"], _BODY, _FUNCTIONS, writes=["array"]))

    def __call__(self, array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
        """Set array[rows] = lines, and return a zero, int32 [1], on which everything that reads the lines must
        depend.

        array: [n, width]; rows: int32 [m]; lines: [m, width]. Of lines for the same row, any may be written.
        """
        (count, width), whole = lines.shape, _RUN_BYTES // array.dtype.size
        run = whole if width % whole == 0 else 1
        runs = width // run
        team = min(1 << (runs - 1).bit_length(), _THREADS)
        groups = (-(-count * team // _THREADS), -(-runs // team), 1)
        template: dict[str, Constant] = {"T": array.dtype, "RUN": run}
        (done,) = self._kernel([array, rows, lines], template, groups, _THREADS, [((1,), mx.int32)])
        return done


# --- Its use ---------------------------------------------------------------------------------------------------------


class Writing(NamedTuple):
    """The way in which arrays are written in place on this device."""

    store: Store | None
    """The kernel that writes; None where MLX's own operations do."""
    problem: str = ""
    """The reason why the device's kernel does not write; empty where it does or where there is none."""
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
    why = verdict.reach(lambda: problem(make) if here.tested_to_write else "")
    if not why:
        return Writing(Store(make), by_outputs=here.ordered_by_outputs)
    log.warning("MLX's own operations write the KV pool: the kernel that writes in place is %s", why)
    return Writing(None, why)


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


# --- Its check -------------------------------------------------------------------------------------------------------

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
    return checking.seconds(lambda: [write(array[:], rows, lines)])
