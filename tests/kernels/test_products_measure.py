"""The stopwatch on the CPU, whose clock is Python's monotonic one."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model.ops.products.measure import Meter, Stopwatch, seconds_between
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")


def nanoseconds(stopwatch_time: mx.array) -> int:
    seconds, rest = stopwatch_time.tolist()
    assert 0 <= rest < 10**9
    return int(seconds * 10**9 + rest)


def test_it_waits_and_then_tells_the_time() -> None:
    stopwatch = Stopwatch(shim.maker())
    stopwatch.start(mx.bfloat16, 20_000)  # the kernel is compiled and loaded now
    before = time.monotonic_ns()
    zero, start = stopwatch.start(mx.bfloat16, 20_000)
    stop = stopwatch.stop(zero)
    assert before + 20_000_000 <= nanoseconds(start) <= nanoseconds(stop) <= time.monotonic_ns()
    assert seconds_between(start, stop) == pytest.approx((nanoseconds(stop) - nanoseconds(start)) / 1e9)
    assert zero.shape == (1, 1) and zero.dtype == mx.bfloat16 and zero.item() == 0


def test_seconds_are_counted_over_the_end_of_one() -> None:
    assert seconds_between(mx.array([6, 999_999_000]), mx.array([7, 2000])) == pytest.approx(3e-6)


def test_calls_are_timed_one_after_the_other_and_depend_on_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[mx.array] = []
    start = Stopwatch.start

    def one(*args: Any) -> tuple[mx.array, mx.array]:
        zero, told = start(*args)
        return zero + 1, told

    monkeypatch.setattr(Stopwatch, "start", one)

    def call(x: mx.array) -> mx.array:
        seen.append(x)
        return x + 1

    x = mx.ones((3, 1, 4), mx.bfloat16)
    assert Meter(shim.maker()).device_seconds([call] * 5, x) > 0
    assert len(seen) % 5 == 0 and len(seen) > 5  # a warm-up and several runs
    assert [each.tolist()[0][0][0] for each in seen[:5]] == [2, 3, 4, 5, 6]  # what begins is x and the zero, here 1
