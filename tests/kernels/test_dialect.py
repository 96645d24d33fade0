"""The dialect's words on the CPU: what kernels are tested with has to be right itself."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model.kernels.dialect import Make, Source
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
WARPS = 3


@pytest.fixture(params=shim.ORDERS)
def make(request: pytest.FixtureRequest) -> Make:
    return shim.maker(request.param)


def block(make: Make, body: str, x: mx.array) -> np.ndarray:
    """One block of as many threads as x has elements, each of which gives one number."""
    kernel = make(Source("words", ["x"], ["y"], body))
    return np.array(kernel([x], {"T": x.dtype}, (1, 1, 1), x.size, [(x.shape, x.dtype)])[0])


def test_lanes_of_a_warp_exchange(make: Make) -> None:
    x = mx.arange(32 * WARPS).astype(mx.float32)
    got = block(make, "float s = x[THREAD]; for (int m = 1; m < 32; m *= 2) s += SHUFFLE_XOR(s, m); y[THREAD] = s;", x)
    assert (got.reshape(WARPS, 32) == np.array(x).reshape(WARPS, 32).sum(1, keepdims=True)).all()
    got = block(make, "float s = SHUFFLE(x[THREAD], (LANE + 5) & 31); y[THREAD] = s;", x)
    assert (got.reshape(WARPS, 32) == np.roll(np.array(x).reshape(WARPS, 32), -5, 1)).all()


def test_warps_may_do_different_work_between_barriers(make: Make) -> None:
    body = """
      SHARED(float, sums, 8);
      float s = x[THREAD];
      for (int i = 0; i <= WARP; i++) s = SHUFFLE_XOR(s, 1) + 1;
      for (int m = 1; m < 32; m *= 2) s += SHUFFLE_XOR(s, m);
      if (LANE == 0) sums[WARP] = s;
      BARRIER();
      y[THREAD] = sums[THREADS / 32 - 1 - WARP];
    """
    x = mx.arange(32 * WARPS).astype(mx.float32)
    sums = [np.array(x).reshape(WARPS, 32)[w].sum() + 32 * (w + 1) for w in range(WARPS)]
    assert (block(make, body, x).reshape(WARPS, 32) == np.array(sums[::-1])[:, None]).all()


def test_a_missing_barrier_shows() -> None:
    body = "SHARED(float, s, 96); s[THREAD] = x[THREAD]; y[THREAD] = s[THREADS - 1 - THREAD];"
    x = mx.arange(96).astype(mx.float32)
    for order in shim.ORDERS:
        assert not np.isfinite(block(shim.maker(order), body, x)).all()
    body = body.replace("y[", "BARRIER(); y[")
    assert (block(shim.maker(), body, x) == np.array(x)[::-1]).all()


def test_what_is_asked_for_is_there_when_it_was_waited_for() -> None:
    """Of two groups the first is waited for: one thread of two has asked for zeros there. The other
    may come earlier."""
    body = """
      ROOM(uint4, room);
      ASYNC16(room + THREAD, x + 4 * THREAD, THREAD == 0);
      ASYNC_CLOSE();
      ASYNC16(room + 2 + THREAD, x + 4 * THREAD, true);
      ASYNC_CLOSE();
      ASYNC_WAIT(1);
      BARRIER();
      for (int i = 0; i < 8; i++) y[THREAD * 8 + i] = ((const float*)room)[THREAD * 8 + i];
    """
    x = mx.arange(1, 9).astype(mx.float32)

    def got(order: shim.Order, groups: int) -> np.ndarray:
        source = Source("asks", ["x"], ["y"], body.replace("WAIT(1)", f"WAIT({groups})"), room=64)
        return np.array(shim.maker(order)(source)([x], {}, (1, 1, 1), 2, [((16,), mx.float32)])[0])

    for order in shim.ORDERS:
        assert (got(order, 1)[:8] == [1, 2, 3, 4, 0, 0, 0, 0]).all()
        assert (got(order, 0)[8:] == np.array(x)).all()
        came = got(order, 1)[8:]
        assert (came == np.array(x)).all() if order == "apart" else np.isnan(came).all()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("float s = x[THREAD]; if (LANE < 7) s = SHUFFLE_XOR(s, 1); y[THREAD] = s;", "did not meet"),
        ("if (THREAD < 7) BARRIER(); y[THREAD] = x[THREAD];", "barrier"),
        ("y[THREAD] = x[THREAD]; if (THREAD == 0) y[THREADS] = 0;", "outside"),
        ("uint4 w = LOAD16(x + 1); y[THREAD] = FLOAT_BITS(w.x);", "aligned"),
        ("y[THREAD] = no_such_thing;", "compile"),
        ("ROOM(uint4, room); ASYNC16(room, x, true);", "outside of the room"),
    ],
)
def test_what_is_wrong_is_said(make: Make, body: str, why: str) -> None:
    with pytest.raises(shim.KernelError, match=why):
        block(make, body, mx.zeros((64,)))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=["bfloat16", "float16"])
def test_numbers_of_16_bits_are_mlx_s(dtype: mx.Dtype) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    every = mx.array(words).view(dtype)
    make = shim.maker()
    widen = make(Source("widen", ["x"], ["y"], "y[GROUP_X * THREADS + THREAD] = float(x[GROUP_X * THREADS + THREAD]);"))
    wide = widen([every], {}, (256, 1, 1), 256, [(every.shape, mx.float32)])[0]
    assert np.array_equal(np.array(wide), np.array(every.astype(mx.float32)), equal_nan=True)
    # Between each two of them, and exactly half-way, where the even one is taken.
    finite = np.sort(np.array(wide)[np.isfinite(np.array(wide))])
    between = np.concatenate([finite, (finite[1:] / 2 + finite[:-1] / 2), finite[:-1] * 0.7 + finite[1:] * 0.3])
    between = mx.array(between[: len(between) // 256 * 256].astype(np.float32))
    narrow = make(Source("narrow", ["x"], ["y"], "int i = GROUP_X * THREADS + THREAD; y[i] = T(x[i]);"))
    got = narrow([between], {"T": dtype}, (between.size // 256, 1, 1), 256, [(between.shape, dtype)])[0]
    assert np.array_equal(np.array(got.view(mx.uint16)), np.array(between.astype(dtype).view(mx.uint16)))
    body = "float2 p = pair(x[THREAD], T()); y[2 * THREAD] = p.x; y[2 * THREAD + 1] = p.y;"
    unpack = make(Source("unpack", ["x"], ["y"], body))
    some = every[1000:1128]
    got = unpack([some.view(mx.uint32)], {"T": dtype}, (1, 1, 1), 64, [((128,), mx.float32)])[0]
    assert np.array_equal(np.array(got), np.array(some.astype(mx.float32)))
