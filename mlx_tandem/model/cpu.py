"""Fast exp, attention and SwiGLU for decode steps on the CPU back end, which spend most of their time in exp.

MLX's exp takes 11 ns per element on an x86-64 CPU, one element at a time. Written out as the operations below, fused
by `mx.compile` and vectorised by the compiler, it takes 2 ns with a relative error under 1e-6
(docs/decisions/cpu-arithmetic.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.models import activations

_LOG2E = 1.4426950408889634
# log 2 in two parts, the first exact in few bits: x - k·log 2 keeps its last bits (Cody and Waite).
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# exp on [-log 2 / 2, log 2 / 2], Cephes' minimax polynomial.
_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Adding this leaves the nearest integer in the low bits of the float.
_ROUND = 12582912.0


def exp(x: mx.array) -> mx.array:
    """Return e to the x in float32, with x clipped to [-87, 88]. It has no gradient: it is for serving only."""
    x = mx.clip(x, -87.0, 88.0)
    shifted = x * _LOG2E + _ROUND
    k = shifted - _ROUND
    f = x - k * _LN2_HIGH - k * _LN2_LOW
    p = mx.array(_TERMS[0], mx.float32)
    for term in _TERMS[1:]:
        p = p * f + term
    p = p * f * f + f + 1.0
    power = ((shifted.view(mx.int32) + 127) << 23).view(mx.float32)
    return p * power


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array,
) -> mx.array:
    """Return attention as `mx.fast.scaled_dot_product_attention` defines it, in float32.

    `mask` is bool [rows, 1, length, positions], or has one more axis before the length. Every query must see a
    position.
    """
    rows, heads, length, dim = queries.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    # The queries that share a KV head are the rows of one product.
    q = (queries * scale).reshape(rows, kv_heads, group * length, dim)
    scores = (q @ keys.swapaxes(-1, -2)).reshape(rows, kv_heads, group, length, -1)
    mask = mask if mask.ndim == 5 else mask[:, :, None]
    scores = mx.where(mask, scores, -1e30)
    weights = mx.where(mask, exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / weights.sum(-1, keepdims=True)
    out = weights.reshape(rows, kv_heads, group * length, -1) @ values
    return out.reshape(rows, heads, length, values.shape[-1])


WORTH = 2048
"""Number of scores from which `attend` is faster than MLX's softmax, which has fewer operations to launch."""

_original_swiglu: Any = activations.swiglu
_serving = False


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if _serving and gate.dtype == mx.float32:
        return gate / (1.0 + exp(-gate)) * x
    result: mx.array = _original_swiglu(gate, x)
    return result


def install() -> None:
    """Replace the SwiGLU activation in every model module imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "swiglu", None) is _original_swiglu:
            module.swiglu = _swiglu  # type: ignore[attr-defined]


@contextmanager
def serving() -> Iterator[None]:
    """Use the fast activation while a step is traced; outside of it, as in training, models compute as mlx-lm wrote
    them.
    """
    global _serving
    _serving = True
    try:
        yield
    finally:
        _serving = False
