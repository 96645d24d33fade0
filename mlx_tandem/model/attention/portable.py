"""The back end that runs wherever MLX does: attention over keys and values that the cache has gathered."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model import cpu, device

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
    large = queries.shape[0] * queries.shape[1] * queries.shape[2] * keys.shape[2] >= cpu.WORTH
    plain = queries.dtype == mx.float32 and sinks is None and mask is not None and mask.dtype == mx.bool_
    if device.is_cpu() and large and plain:
        assert mask is not None
        return cpu.attend(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
