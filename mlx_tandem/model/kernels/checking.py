"""The frame that all kernel checks share: which kernels this device can run, what happens when a check fails, and how
errors, bandwidth and the duration of work are measured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Sequence
from typing import Generic, NamedTuple, TypeVar

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.model import backend
from mlx_tandem.model.kernels import dialect

log = logging.getLogger(__name__)

T = TypeVar("T")

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Largest error of sums of products by type, relative to the largest number of a result: for the short types, twice
their rounding error.
"""

Pieces = Generator[None, None, T]
"""Work that can be interrupted: each `next` does a piece of it, a check of one shape or a measurement, and the
generator returns the result."""

MAX_REASON = 500
"""Characters of a compiler's or driver's message that go into a reason."""


class Choice(NamedTuple, Generic[T]):
    """The choice that a kernel check made for this device, and why."""

    chosen: T
    """The kernel, or what is used instead of it."""

    reason: str
    """A sentence for logs and reports."""


class Rejected(Exception):
    """Raised by a check when its kernel must not be used; the message is the reason."""


class Verdict:
    """The result of a check at start, of this process or of another process that has passed it on.

    found: why the kernels are not used; empty if they are used, None if the check was not run yet.
    """

    def __init__(self) -> None:
        self.found: str | None = None
        self._given: str | None = None

    @property
    def was_given(self) -> bool:
        """Whether another process found that the kernels can be used."""
        return self._given == ""

    def give(self, problem: str | None) -> None:
        """Take what another process found, so that nothing is checked; None: begin again."""
        self.found, self._given = None, problem

    def reach(self, check: Callable[[], str]) -> str:
        """Return the problem: that of the other process, or what `check` returns."""
        self.found = check() if self._given is None else self._given
        return self.found


def makers_of_device(given: Sequence[dialect.Make] | None) -> Sequence[dialect.Make]:
    """Return `given`, or if it is None the makers of kernels for the targets of the default device."""
    return [dialect.maker(target) for target in dialect.available()] if given is None else given


def finish(pieces: Pieces[T]) -> T:
    """Do all pieces one after the other and return the result."""
    while True:
        try:
            next(pieces)
        except StopIteration as e:
            result: T = e.value
            return result


def checked(name: str, check: Callable[[], T], otherwise: Callable[[str], T]) -> T:
    """Return the result of `check`, or where the kernel cannot be used, that of `otherwise`, which is given the reason.

    A kernel cannot be used when `check` raises Rejected, or when anything else fails, such as a compiler or a driver;
    the latter is logged with its traceback. `name` is the kernel's name in the log.
    """

    def whole() -> Pieces[T]:
        yield from ()
        return check()

    return finish(checked_in_pieces(name, whole(), otherwise))


def checked_in_pieces(name: str, check: Pieces[T], otherwise: Callable[[str], T]) -> Pieces[T]:
    """Do what `checked` does, piece by piece."""
    try:
        return (yield from check)
    except Rejected as e:
        reason = str(e)
    except Exception as e:
        log.warning("%s failed its check", name, exc_info=True)
        reason = f"{type(e).__name__}: {e}".strip()[:MAX_REASON]
    finally:
        mx.clear_cache()
    return otherwise(reason)


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """Return the largest difference of two arrays, divided by the largest absolute value of the second.

    It is infinity if the result is not finite.
    """
    a, b = (np.array(x.astype(mx.float32)) for x in (ours, theirs))
    error = float(np.abs(a - b).max() / np.abs(b).max())
    return error if np.isfinite(error) else float("inf")


def floats(array: mx.array) -> npt.NDArray[np.float32]:
    """Return the array as float32 on the host."""
    return np.array(array.astype(mx.float32))


# --- Measurements ----------------------------------------------------------------------------------------------------


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
