"""Check of the kernel of the gated delta rule: it must agree with mlx-lm's own operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_tandem.model.kernel_checks.frame import Rejected, checked, relative_error
from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.gated_delta import GatedDelta, RuleInputs

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference from mlx-lm's operations, as a fraction of the largest number."""

CHECKED = ((mx.bfloat16, False, 128), (mx.float32, True, 64))
"""The forms that are checked at start, as the arguments of `largest_error`: both ways to load a state, in both types of
models. Each form takes a second or more to compile on a GPU.
"""


def problem(make: Make) -> str:
    """Return why the kernel made by `make` cannot be used; empty if it can."""

    def check() -> str:
        kernel = GatedDelta(make)
        for dtype, by_column, dk in CHECKED:
            if (error := largest_error(kernel, dtype, by_column=by_column, dk=dk)) > TOLERANCE[dtype]:
                raise Rejected(f"wrong by {error:.1e} in {dtype}")
        return ""

    return checked("the kernel of the gated delta rule", check, lambda reason: reason)


def largest_error(kernel: GatedDelta, dtype: mx.Dtype, *, by_column: bool, dk: int) -> float:
    """Return the largest difference of outputs and states over a chunk, in place and not, as a fraction of the largest
    number. `by_column` and `dk`: as in `_drawn`.
    """
    inputs, state = _drawn(dtype, by_column=by_column, dk=dk)
    want, want_after = gated_delta_ops(*inputs, state)
    rows = len(state)
    apart, after = kernel(inputs, state)
    lines = state.reshape(rows, -1)
    pool = mx.concatenate([mx.zeros_like(lines[:2]), lines, mx.zeros_like(lines)])
    mx.eval(pool)
    read, write = mx.arange(2, 2 + rows, dtype=mx.int32), mx.arange(2 + rows, 2 + 2 * rows, dtype=mx.int32)
    together = kernel.in_place(inputs, pool, read, write)
    mx.eval(together)  # MLX does not order a read of the pool behind the kernel's write
    pairs = [
        (apart, want),
        (after, want_after),
        (together, want),
        (pool[2 + rows :].reshape(state.shape), want_after),
        (pool[2 : 2 + rows].reshape(state.shape), state),
    ]
    return max(relative_error(ours, theirs) for ours, theirs in pairs)


def _drawn(dtype: mx.Dtype, *, by_column: bool, dk: int) -> tuple[RuleInputs, mx.array]:
    """Return random inputs of five tokens of three rows, and their states before.

    by_column: whether the decay is given for each column of the state; dk: the number of columns.
    """
    rng = np.random.default_rng(0)
    rows, length, key_heads, heads, dv = 3, 5, 2, 4, 26

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5)

    decay = rng.uniform(0.5, 1.0, (rows, length, heads, dk) if by_column else (rows, length, heads))
    strength = rng.uniform(0.1, 0.9, (rows, length, heads))
    inputs = RuleInputs(
        normal(rows, length, key_heads, dk).astype(dtype),
        normal(rows, length, key_heads, dk).astype(dtype),
        normal(rows, length, heads, dv).astype(dtype),
        mx.array(decay.astype(np.float32)),
        mx.array(strength.astype(np.float32)).astype(dtype),
    )
    return inputs, normal(rows, heads, dv, dk)
