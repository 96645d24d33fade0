"""Check of the kernel of the gated delta rule: it must agree with mlx-lm's own operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_tandem.model.kernel_checks.frame import Rejected, checked
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.gated_delta import GatedDelta, Given

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference from mlx-lm's operations, as a fraction of the largest number."""

CHECKED = ((mx.bfloat16, False), (mx.float32, True))
"""The forms that are checked at start: each takes a second or more to compile on a GPU."""


def problem(make: Make) -> str:
    """Return why the kernel made by `make` cannot be used; empty if it can."""

    def check() -> str:
        kernel = GatedDelta(make)
        for dtype, by_column in CHECKED:
            if (error := largest_error(kernel, dtype, by_column=by_column)) > TOLERANCE[dtype]:
                raise Rejected(f"wrong by {error:.1e} in {dtype}")
        return ""

    return checked("the kernel of the gated delta rule", check, lambda reason: reason)


def drawn(
    dtype: mx.Dtype, *, by_column: bool, rows: int = 3, length: int = 5, heads: tuple[int, int] = (2, 4), dv: int = 24
) -> Given:
    """Return random inputs in which the state neither grows nor vanishes. heads: of keys and of values."""
    rng = np.random.default_rng(0)
    keys, values, dk = *heads, 64

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5).astype(dtype)

    kept = rng.uniform(0.5, 1.0, (rows, length, values, dk) if by_column else (rows, length, values))
    rate = rng.uniform(0.1, 0.9, (rows, length, values))
    return Given(
        normal(rows, length, keys, dk),
        normal(rows, length, keys, dk),
        normal(rows, length, values, dv),
        mx.array(kept.astype(np.float32)),
        mx.array(rate.astype(np.float32)).astype(dtype),
    )


def largest_error(kernel: GatedDelta, dtype: mx.Dtype, *, by_column: bool) -> float:
    """Return the largest difference of outputs and states over a chunk that begins and one that goes on, in place and
    not, as a fraction of the largest number.
    """
    given = drawn(dtype, by_column=by_column)
    rows, _, heads, dv = given.v.shape
    first, begun = kernel(given, None)
    want_first, want_begun = gated_delta_ops(*given)
    second, gone_on = kernel(given, want_begun)
    want_second, want_gone_on = gated_delta_ops(*given, want_begun)
    pool = mx.concatenate([mx.zeros((2, begun[0].size)), want_begun.reshape(rows, -1), mx.zeros((rows, begun[0].size))])
    mx.eval(pool)
    read, write = mx.arange(2, 2 + rows, dtype=mx.int32), mx.arange(2 + rows, 2 + 2 * rows, dtype=mx.int32)
    third, done = kernel.in_place(given, pool, read, write)
    mx.eval(third, done)  # MLX does not order a read of the pool behind the kernel's write
    written = pool[2 + rows :].reshape(rows, heads, dv, -1)
    pairs = [
        (first, want_first),
        (begun, want_begun),
        (second, want_second),
        (gone_on, want_gone_on),
        (third, want_second),
        (written, want_gone_on),
        (pool[2 : 2 + rows].reshape(want_begun.shape), want_begun),
    ]
    return max(_difference(ours, theirs) for ours, theirs in pairs)


def _difference(ours: mx.array, theirs: mx.array) -> float:
    a, b = (np.array(x.astype(mx.float32)) for x in (ours, theirs))
    error = float(np.abs(a - b).max() / np.abs(b).max())
    return error if np.isfinite(error) else float("inf")
