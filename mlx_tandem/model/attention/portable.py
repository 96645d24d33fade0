"""The back end that runs wherever MLX does: attention over keys and values that the cache has gathered."""

from __future__ import annotations

import mlx.core as mx

NAME = "portable"


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None,
) -> mx.array:
    """[rows, heads, length, dim]; keys and values [rows, kv heads, positions, dim]; mask as the cache made it."""
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
