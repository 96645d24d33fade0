"""Check of the kernel of the gated delta rule: it must agree with mlx-lm's own operations, and be faster than mlx-lm's
kernel where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_tandem.model.kernels.dialect import Make
from mlx_tandem.model.kernels.gated_delta import GatedDelta, RuleInputs
from mlx_tandem.model.ops import timing
from mlx_tandem.model.ops.checking import Rejected, checked, relative_error
from mlx_tandem.model.ops.inplace import Store

Rule = Callable[..., tuple[mx.array, mx.array]]
"""Function that returns the outputs and the states after, given the inputs of the rule and the states."""

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference from mlx-lm's operations, as a fraction of the largest number."""

CHECKED = ((mx.bfloat16, False, 128), (mx.float32, True, 64))
"""The forms that are checked at start, as the arguments of `largest_error`: both ways to load a state, in both types of
models. Each form takes a second or more to compile on a GPU.
"""

ROWS, HEADS = 8, (32, 128)
"""Rows of the decode step that is timed, and the number and width of its heads, which are those of Qwen3.5-9B."""


def problem(make: Make, rival: Rule | None = None, store: Store | None = None) -> str:
    """Return why the kernel made by `make` cannot be used; empty if it can.

    rival: a function that the kernel has to be faster than. Its states are written by `store`.
    """

    def check() -> str:
        kernel = GatedDelta(make)
        for dtype, by_column, dk in CHECKED:
            if (error := largest_error(kernel, dtype, by_column=by_column, dk=dk)) > TOLERANCE[dtype]:
                raise Rejected(f"wrong by {error:.1e} in {dtype}")
        if rival is not None and store is not None:
            ours, theirs = _seconds(kernel, rival, store)
            if ours >= theirs:
                raise Rejected(f"slower: {ours * 1e6:.0f} µs for {ROWS} rows, mlx-lm's takes {theirs * 1e6:.0f}")
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


def _seconds(kernel: GatedDelta, rival: Rule, store: Store) -> tuple[float, float]:
    """Return the seconds of one token of ROWS rows, with states in a pool: by the kernel, and by `rival`. For
    `rival` the states are gathered and written back.
    """
    heads, dim = HEADS
    q, k, v = (mx.random.normal((ROWS, 1, heads, dim)).astype(mx.bfloat16) for _ in range(3))
    inputs = RuleInputs(q, k * dim**-0.5, v, mx.full((ROWS, 1, heads), 0.9), mx.full((ROWS, 1, heads), 0.5, v.dtype))
    pool = mx.zeros((2 * ROWS, heads * dim * dim))
    read, write = mx.arange(ROWS, dtype=mx.int32), mx.arange(ROWS, 2 * ROWS, dtype=mx.int32)
    mx.eval(*inputs, pool, read, write)

    def gathered() -> list[mx.array]:
        y, state = rival(*inputs, pool[read].reshape(ROWS, heads, dim, dim))
        return [y, store(pool, write, state.reshape(ROWS, -1))]

    ours = timing.seconds(lambda: [kernel.in_place(inputs, pool, read, write)])
    return ours, timing.seconds(gathered)
