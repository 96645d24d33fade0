"""Check of the fused path through gated delta nets: it must agree with the layer's own code, and be faster on Metal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache

from mlx_tandem.model import gated_delta
from mlx_tandem.model.cache.states import StateArray, StateCache, StateShape, StateView
from mlx_tandem.model.kernel_checks.gated_delta import TOLERANCE
from mlx_tandem.model.ops import timing
from mlx_tandem.model.ops.checking import Rejected, checked, relative_error

ROWS, TOKENS = 3, 2

TIMED_ROWS = 8
"""Rows of the decode step that is timed."""


def problem(layer: nn.Module, own: float | None = None) -> str:
    """Return why a layer must not take the fused path that it was given; empty if it may.

    own: the `seconds` of the layer's own code, which the fused path has to beat; None: the path is not timed.
    """

    def check() -> str:
        error, dtype = largest_error(layer)
        if not error <= TOLERANCE[dtype]:
            raise Rejected(f"the fused path is wrong by {error:.1e} in {dtype}")
        if own is not None and (ours := seconds(layer)) >= own:
            figures = f"{ours * 1e6:.0f} µs for {TIMED_ROWS} rows, and {own * 1e6:.0f} without it"
            raise Rejected(f"the fused path is slower: {figures}")
        return ""

    return checked("the fused path through gated delta nets", check, lambda reason: reason)


def largest_error(layer: Any, *, by_tokens: bool = True) -> tuple[float, mx.Dtype]:
    """Return the largest relative difference of outputs and states over a few tokens, and the type of the layer.

    by_tokens: whether the layer is given [tokens, dim] instead of [rows, length, dim].

    The reference is the layer's own code, which also runs on the fused layer if its cache is one of mlx-lm's own.
    """
    rng = np.random.default_rng(0)
    dtype = layer.conv1d.weight.dtype

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    own: Any = ArraysCache(2)
    products = normal(ROWS, layer.conv_kernel_size - 1, layer.conv_dim).astype(dtype)
    state = normal(ROWS, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    own[0], own[1] = products, state
    x = normal(ROWS, TOKENS, layer.hidden_size).astype(dtype)
    want = layer(x, None, own)
    arrays = [products, state]
    shape = StateShape(tuple(StateArray(a.shape[1:], a.dtype) for a in arrays))
    pool = [_apart(a.reshape(ROWS, -1)) for a in arrays]
    mx.eval(pool)
    cache = StateCache(shape)
    view = StateView(mx.arange(2, 2 + ROWS, dtype=mx.int32), mx.arange(2 + ROWS, 2 + 2 * ROWS, dtype=mx.int32))
    cache.bind(pool, view)
    if by_tokens and not layer.takes_tokens(x, TOKENS, None, cache):
        raise Rejected("the fused path does not take tokens")
    got = layer(x.reshape(-1, x.shape[-1]) if by_tokens else x, None, cache).reshape(x.shape)
    if cache.gathered_bytes():
        raise Rejected("the fused path was not taken")
    cache.release()
    mx.eval(got)  # MLX does not order a read of the pool behind the kernels' writes
    pairs = [(got, want)]
    for i, array in enumerate(arrays):
        pairs += [
            (pool[i][2 + ROWS :].reshape(array.shape), own[i]),
            (pool[i][2 : 2 + ROWS].reshape(array.shape), array),
        ]
    return max(relative_error(ours, theirs) for ours, theirs in pairs), dtype


def seconds(layer: Any) -> float:
    """Return the seconds of a layer in a decode step of TIMED_ROWS rows, by the path that it takes now."""
    dtype = layer.conv1d.weight.dtype
    products = StateArray((layer.conv_kernel_size - 1, layer.conv_dim), dtype)
    shape = StateShape((products, StateArray((layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), mx.float32)))
    pool = [mx.zeros((2 * TIMED_ROWS, width), of) for half in shape.halves for width, of in half.lines()]
    read, write = mx.arange(TIMED_ROWS, dtype=mx.int32), mx.arange(TIMED_ROWS, 2 * TIMED_ROWS, dtype=mx.int32)
    x = mx.random.normal((TIMED_ROWS, 1, layer.hidden_size)).astype(dtype)
    mx.eval(pool, read, write, x)

    def step() -> list[mx.array]:
        cache, view = StateCache(shape), StateView(read, write)
        cache.bind(pool, view)
        with gated_delta.using_kernel(cache):
            out = layer(x, None, cache)
        cache.release()
        return [out, *view.written]

    return timing.seconds(step)


def _apart(lines: mx.array) -> mx.array:
    """Return a pool that holds two lines of zeros, then these lines, then as many lines of zeros."""
    return mx.concatenate([mx.zeros_like(lines[:2]), lines, mx.zeros_like(lines)])
