"""The attention back end for every device: attention over keys and values that the cache has gathered."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model import cpu, device

NAME = "portable"
"""Name of this back end."""


def attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array:
    """Return attention [rows, heads, length, dim].

    `keys` and `values` are [rows, kv heads, positions, dim]; `mask` is as the cache made it.
    """
    if device.is_cpu() and isinstance(mask, mx.array) and mask.dtype == mx.bool_ and sinks is None:
        large = queries.shape[0] * queries.shape[1] * queries.shape[2] * keys.shape[2] >= cpu.WORTH
        if large and queries.dtype == mx.float32:
            return cpu.attend(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
