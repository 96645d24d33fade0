"""Attention of long sequences in learning gives what one piece gives, in memory that grows with their length only."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_tandem.model import backend
from mlx_tandem.model.ops.attention import portable

LENGTH = portable.LONG + 200  # its last block is not full


def plain(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def arrays(length: int, heads: int = 4, kv_heads: int = 2) -> tuple[mx.array, mx.array, mx.array]:
    keys = mx.random.split(mx.random.key(length), 3)
    return tuple(
        mx.random.normal((2, n, length, 16), key=k) for k, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )  # type: ignore[return-value]


def window(length: int, size: int = 100) -> mx.array:
    at = mx.arange(length)
    return (at[None] <= at[:, None]) & (at[None] > at[:, None] - size)


@pytest.mark.parametrize("kind", ["causal", "window", "none", "sinks"])
def test_blocks_give_what_one_piece_gives(kind: str) -> None:
    q, k, v = arrays(LENGTH)
    mask = {"window": window(LENGTH), "none": None}.get(kind, "causal")
    sinks = mx.random.normal((4,), key=mx.random.key(1)) if kind == "sinks" else None

    def loss(attend: object, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        out = attend(q, k, v, 0.25, mask, sinks)  # type: ignore[operator]
        return (out * mx.cos(mx.arange(out.size).reshape(out.shape))).sum()

    one, own = mx.value_and_grad(loss, argnums=(1, 2, 3)), mx.value_and_grad(loss, argnums=(1, 2, 3))
    expected, wanted = one(plain, q, k, v)
    value, gradients = own(portable.in_blocks, q, k, v)
    assert mx.allclose(value, expected, rtol=1e-4, atol=1e-3)
    for given, want in zip(gradients, wanted, strict=True):
        assert mx.abs(given - want).max() <= 2e-5 * mx.abs(want).max(), kind


def test_short_sequences_and_those_with_a_cache_go_in_one_piece() -> None:
    q, k, v = arrays(portable.LONG)
    assert portable.in_blocks(q, k, v, 1.0, "causal", None) is None
    q, k, v = arrays(LENGTH)
    assert portable.in_blocks(q[:, :, -7:], k, v, 1.0, "causal", None) is None


@pytest.mark.skipif(
    backend.current().learning.attention_has_gradient, reason="a GPU of NVIDIA has a kernel that needs no blocks"
)
def test_memory_does_not_grow_with_the_square_of_the_length() -> None:
    def needed(length: int) -> int:
        q, k, v = arrays(length, heads=1, kv_heads=1)
        mx.eval(q, k, v)
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        gradient = mx.grad(lambda q: portable.in_blocks(q, k, v, 0.25, "causal", None).sum())(q)  # type: ignore[union-attr]
        mx.eval(gradient)
        return int(mx.get_peak_memory() - before)

    assert needed(8192) < 3 * needed(4096)
