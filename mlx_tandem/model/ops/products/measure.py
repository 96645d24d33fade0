"""The linears of a model by shape and precision, and measurements of how long they take on this device.

On CUDA a stopwatch of two kernels measures how long the device takes for what runs between them, by its own clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.model import backend
from mlx_tandem.model.kernels.dialect import Make, Source, maker
from mlx_tandem.model.ops.products.merged import MergedMember

_SECOND = 10**9
"""Nanoseconds of a second."""

_TELL = """
  time[0] = int(now / 1000000000ll);
  time[1] = int(now % 1000000000ll);
"""

_START = (
    """
  const long long first = NANOSECONDS();
  long long now = first;
  while (now - first < 1000ll * MICROSECONDS) now = NANOSECONDS();
  zero[0] = T(0.0f);
"""
    + _TELL
)

_STOP = "  const long long now = NANOSECONDS();\n  (void)x;\n" + _TELL


class Stopwatch:
    """A stopwatch on the device."""

    def __init__(self, make: Make):
        self._start = make(Source("start_stopwatch", ["nothing"], ["zero", "time"], _START))
        self._stop = make(Source("stop_stopwatch", ["x"], ["time"], _STOP))

    def start(self, dtype: mx.Dtype, microseconds: int) -> tuple[mx.array, mx.array]:
        """Wait on the device, then return a zero [1, 1] of a type and the time [2], int32: seconds and nanoseconds.

        Operations that depend on the zero run after the wait. The host can launch them meanwhile.
        """
        zero, time = self._start(
            [mx.zeros((8,), mx.int32)],
            {"T": dtype, "MICROSECONDS": microseconds},
            (1, 1, 1),
            1,
            [((1, 1), dtype), ((2,), mx.int32)],
        )
        return zero, time

    def stop(self, x: mx.array) -> mx.array:
        """Return the time when x has been computed."""
        (time,) = self._stop([x], {}, (1, 1, 1), 1, [((2,), mx.int32)])
        return time


def seconds_between(start: mx.array, stop: mx.array) -> float:
    """Return the seconds between two times of a stopwatch."""
    seconds, nanoseconds = np.array(stop) - np.array(start)
    return float(seconds + nanoseconds / _SECOND)


_CALLS, _CALL_BYTES = 16, 400 << 20
"""Linears of one kind that are timed together: so many, or as many as have so many bytes of weights."""

_REPEATS = 5
"""Repeats of a measurement, of which the best counts."""

_HOST_REPEATS = 20
"""Repeats of a measurement of the host's time, which is short and varies more."""

_AHEAD = 4000
"""Microseconds for which the device waits before timed calls: many times what the host takes to launch them."""

HOST_SHARE = 0.25
"""Weight of a second of the host in costs, where a second of the device has weight 1. It is below 1 because most of the
host's work is hidden behind the device's, and above 0 because steps of few rows wait for the host on slow hosts."""

Call = Callable[[mx.array], mx.array]
"""Function that computes a linear's output for an input."""


@dataclass(frozen=True)
class Kind:
    """Linears of one shape and precision."""

    inputs: int
    nbytes: int
    """Bytes of the weight of one linear."""

    modules: list[nn.Module]

    @property
    def packed(self) -> list[nn.QuantizedLinear]:
        """The quantised linears among the modules."""
        return [m for m in self.modules if isinstance(m, nn.QuantizedLinear)]

    def some(self) -> list[nn.Module]:
        """Return so many modules that their weights do not all fit into the device's cache."""
        return self.modules[: max(1, min(_CALLS, _CALL_BYTES // self.nbytes))]

    def several(self) -> list[nn.Module]:
        """Return so many modules that starting and ending a measurement counts for little; some of them more than
        once.
        """
        return list(islice(cycle(self.some()), _CALLS))


class Meter:
    """Measures products on the device."""

    def __init__(self, make: Make | None = None):
        """`make` makes kernels for the device, by default for CUDA."""
        self._make = make
        self._stopwatch: Stopwatch | None = None

    def seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        """Return the seconds of the calls, run one after the other in one graph, the best of a few runs after a
        warm-up.

        Each call depends on the output of the one before it: a GPU would run independent ones at the same time,
        which hides how long one takes.
        """
        times = []
        for _ in range(1 + _REPEATS):
            started = time.perf_counter()
            mx.eval(_chain(calls, x))
            times.append(time.perf_counter() - started)
        return min(times[1:])

    def device_seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        """Return the seconds of the calls on the device alone, the best of a few runs after a warm-up.

        The device first waits for _AHEAD microseconds, in which the host launches all calls, and then measures them by
        its own clock.
        """
        stopwatch = self._stopwatch = self._stopwatch or Stopwatch(self._make or maker("cuda"))
        times = []
        for _ in range(1 + _REPEATS):
            zero, start = stopwatch.start(x.dtype, _AHEAD)
            mx.async_eval(zero, start)
            stop = stopwatch.stop(_chain(calls, x + zero))
            mx.eval(stop)
            times.append(seconds_between(start, stop))
        return min(times[1:])

    def host_seconds(self, calls: Sequence[Call], x: mx.array) -> float:
        """Return the seconds that the host takes to launch the calls in a compiled step."""
        step = mx.compile(partial(_chain, calls))
        times = []
        for _ in range(1 + _HOST_REPEATS):
            mx.eval(x)
            started = time.perf_counter()
            y = step(x)
            mx.async_eval(y)
            times.append(time.perf_counter() - started)
            mx.eval(y)
        return min(times[1:])

    def growth(self, calls: Sequence[Callable[[], mx.array]]) -> int:
        """Return the bytes that the calls need in one graph beyond what is in use before."""
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval([call() for call in calls])
        return int(mx.get_peak_memory() - before)

    def now(self) -> float:
        """Return the time in seconds by a clock that never goes back."""
        return time.perf_counter()


def _chain(calls: Sequence[Call], x: mx.array) -> mx.array:
    """Return the result of calls that each depend on the one before."""
    for call in calls:
        x = mx.maximum(x, call(x)[..., :1])
    return x


def kinds(model: nn.Module, *, joined: bool = False) -> dict[str, Kind]:
    """Return the linears of a model by shape and precision, in the model's order.

    joined: whether the parts of a merged linear that is not quantised count as one linear, as steps compute them.
    """
    found: dict[str, Kind] = {}
    named = [module for _, module in reversed(model.named_modules())]
    for module in {id(each): each for each in (map(_joined, named) if joined else named)}.values():
        if isinstance(module, nn.QuantizedLinear):
            inputs = module.weight.shape[1] * 32 // module.bits
            how = f"{module.mode} {module.bits} bits in {module.group_size}"
        elif isinstance(module, nn.Linear):
            inputs, how = module.weight.shape[1], str(module.weight.dtype).rpartition(".")[2]
        else:
            continue
        name = f"{module.weight.shape[0]} x {inputs} {how}"
        found.setdefault(name, Kind(inputs, module.weight.nbytes, [])).modules.append(module)
    return found


def _joined(module: nn.Module) -> nn.Module:
    """Return the merged linear of which an unquantised linear is a part, or else the module.

    Quantised parts stay apart, because steps of many tokens compute them one by one (`Merged.joins`).
    """
    whole: nn.Module | None = module._merged.linear if isinstance(module, MergedMember) else None
    return whole if isinstance(whole, nn.Linear) else module


def pass_seconds(own: Mapping[str, Kind], dtype: mx.Dtype, rows: int, meter: Meter) -> float:
    """Return the seconds that all linears take for `rows` rows, estimated from some linears of each kind."""
    return _of_all(own, dtype, rows, Kind.some, meter.seconds)


def pass_cost(own: Mapping[str, Kind], dtype: mx.Dtype, rows: int, meter: Meter) -> float:
    """Return what all linears cost for `rows` rows, in weighted seconds.

    Where device and host are timed apart it is the device's time plus HOST_SHARE of the host's. Elsewhere it is
    `pass_seconds`.
    """
    if not backend.current().products.timed_apart:
        return pass_seconds(own, dtype, rows, meter)

    def cost(calls: Sequence[Call], x: mx.array) -> float:
        return meter.device_seconds(calls, x) + HOST_SHARE * meter.host_seconds(calls, x)

    return _of_all(own, dtype, rows, Kind.several, cost)


def _of_all(
    own: Mapping[str, Kind],
    dtype: mx.Dtype,
    rows: int,
    some: Callable[[Kind], list[nn.Module]],
    measure: Callable[[Sequence[Call], mx.array], float],
) -> float:
    """Return a measure of all linears for `rows` rows, estimated from `some` linears of each kind."""
    total = 0.0
    for kind in own.values():
        calls = some(kind)
        total += measure(calls, input_of(kind, dtype, rows)) * len(kind.modules) / len(calls)
    return total


def input_of(kind: Kind, dtype: mx.Dtype, rows: int) -> mx.array:
    """Return random numbers [rows, 1, inputs], the shape of the input of such a linear in a decode step."""
    x = mx.random.normal((rows, 1, kind.inputs), key=mx.random.key(rows)).astype(dtype)
    mx.eval(x)
    return x
