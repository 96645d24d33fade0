"""Fast exp, attention and SwiGLU for the CPU back end, where decode steps spend most of their time in exp.

MLX's exp takes 11 ns per element on an x86-64 CPU, one element at a time. Written out as the operations below, fused
by `mx.compile` and vectorised by the compiler, it takes 2 ns with a relative error under 1e-6
(docs/decisions/cpu-arithmetic.md). A step is compiled as a whole; learning is not, and has exp and SwiGLU compiled by
themselves, the latter with a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
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
    """Return e to the x in float32, with x clipped to [-87, 88]. It has no gradient, and is fast only when compiled."""
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


def attend_behind(
    queries: mx.array,
    context: Sequence[mx.array],
    own: Sequence[mx.array],
    scale: float,
    mask: mx.array,
) -> mx.array:
    """Return the attention of one query a row over two parts of keys and values, without joining the parts.

    context: the keys and values [rows, kv heads, positions, dim] of the first part, whose positions are seen by `mask`,
    bool [rows, 1 (, 1), 1, positions]; own: the keys and values of the second part, whose positions are all seen.
    """
    rows, heads, _, dim = queries.shape
    kv_heads, positions = context[0].shape[1:3]
    q = (queries * scale).reshape(rows, kv_heads, heads // kv_heads, dim)
    mask = mask.reshape(rows, 1, 1, positions)
    before, last = mx.where(mask, q @ context[0].swapaxes(-1, -2), -1e30), q @ own[0].swapaxes(-1, -2)
    top = mx.maximum(before.max(-1, keepdims=True), last.max(-1, keepdims=True))
    # The second part has few scores, for which MLX's own exp has fewer operations.
    before, last = mx.where(mask, exp(before - top), 0.0), mx.exp(last - top)
    total = before.sum(-1, keepdims=True) + last.sum(-1, keepdims=True)
    return ((before @ context[1] + last @ own[1]) / total).reshape(rows, heads, 1, -1)


WORTH = 2048
"""Number of scores from which `attend` is faster than MLX's own attention, which has fewer operations to launch."""

SMALL = 2048
"""Number of elements below which a step uses MLX's own SwiGLU: its single operation then takes less time than several
operations of this module."""

LARGE = 1 << 15
"""Number of elements from which learning uses the functions of this module: each new size is traced once."""

KEPT_SIZES = 64
"""Most sizes for which a traced function is kept. MLX itself would keep all of them."""


@lru_cache(maxsize=KEPT_SIZES)
def _traced(function: Callable[..., Any], size: int) -> Callable[..., Any]:
    """Return a function of arrays of one axis with `size` elements, compiled."""
    return mx.compile(lambda *arrays: function(*arrays))


def fused_exp(x: mx.array) -> mx.array:
    """Return `exp` of x in float32, compiled by itself."""
    if x.size < LARGE:
        return mx.exp(mx.clip(x, -87.0, 88.0))
    result: mx.array = _traced(exp, x.size)(x.reshape(-1)).reshape(x.shape)
    return result


def _gated(gate: mx.array, x: mx.array) -> tuple[mx.array, mx.array]:
    """Return SwiGLU and the sigmoid of the gate, which the gradient needs."""
    share = 1.0 / (1.0 + exp(-gate))
    return gate * share * x, share


def _gated_at_once(gate: mx.array, x: mx.array) -> list[mx.array]:
    return [y.reshape(gate.shape) for y in _traced(_gated, gate.size)(gate.reshape(-1), x.reshape(-1))]


@partial(mx.compile, shapeless=True)
def _gated_gradients(gate: mx.array, x: mx.array, share: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    shared = cotangent * share
    return shared * x * (1.0 + gate * (1.0 - share)), shared * gate


def _gated_vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    (gate, x), (cotangent, _), (_, share) = primals, cotangents, outputs
    gradients: tuple[mx.array, mx.array] = _gated_gradients(gate, x, share, cotangent)
    return gradients


_with_gradient: Any = mx.custom_function(_gated_at_once)
_with_gradient.vjp(_gated_vjp)


_alike_with_gradient: Any = mx.custom_function(lambda gate, x: list(_gated(gate, x)))
_alike_with_gradient.vjp(_gated_vjp)

_original_swiglu: Any = activations.swiglu
_serving = False
_alike = False


def _swiglu(gate: mx.array, x: mx.array) -> mx.array:
    if gate.dtype == x.dtype == mx.float32 and gate.shape == x.shape:
        if _alike:
            return _gated(gate, x)[0] if _serving else _alike_with_gradient(gate, x)[0]
        if _serving and gate.size >= SMALL:
            return gate / (1.0 + exp(-gate)) * x
        if gate.size >= LARGE:
            result: mx.array = _with_gradient(gate, x)[0]
            return result
    result = _original_swiglu(gate, x)
    return result


def install() -> None:
    """Replace the SwiGLU activation in every model module imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "swiglu", None) is _original_swiglu:
            module.swiglu = _swiglu  # type: ignore[attr-defined]


@contextmanager
def serving() -> Iterator[None]:
    """Use the activation without a gradient while a step is traced, which is fused with what is around it."""
    global _serving
    _serving = True
    try:
        yield
    finally:
        _serving = False


@contextmanager
def alike() -> Iterator[None]:
    """Use one function of an activation for any number of elements, while a forward is traced in the block."""
    global _alike
    _alike = True
    try:
        yield
    finally:
        _alike = False
