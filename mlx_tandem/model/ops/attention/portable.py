"""Attention on every device: over keys and values that the cache has gathered, and without a cache.

Learning needs attention over whole sequences with a gradient. Where MLX has no fused kernel with a gradient (Metal and
the CPU), it makes the scores of all queries and all positions at once: memory that grows with the square of the length.
Here long sequences go a block of queries at a time, and each block is computed again in the backward pass, so that the
scores of one block exist at any time.

`install` sends the attention calls of mlx-lm's model modules to the cache that they are given, or without a cache to
`in_blocks`.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from mlx_tandem.model import backend

NAME = "portable"
"""Name of this back end."""


QUERIES = 512
"""Queries of a block."""

LONG = 1024
"""Longest sequence that is computed in one piece: its scores are small, and one piece is fastest."""


def in_blocks(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    mask: mx.array | str | None,
    sinks: mx.array | None,
) -> mx.array | None:
    """Return attention [rows, heads, length, dim], a block of queries at a time; None where one piece is better.

    keys, values: [rows, kv heads, length, dim]. mask: "causal", None, or an array whose last two axes are queries and
    positions.
    """
    length = queries.shape[2]
    if length <= LONG or keys.shape[2] != length or backend.current().learning.attention_has_gradient:
        return None
    parts = []
    for start in range(0, length, QUERIES):
        stop = min(start + QUERIES, length)
        # A causal block sees no position behind its last query.
        seen = stop if isinstance(mask, str) else length
        own = mask[..., start:stop, :] if isinstance(mask, mx.array) and mask.shape[-2] > 1 else mask
        parts.append(_block(queries[:, :, start:stop], keys[:, :, :seen], values[:, :, :seen], scale, own, sinks))
    return mx.concatenate(parts, axis=2)


def _block(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Any, sinks: Any) -> mx.array:
    def attend(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    out: mx.array = mx.checkpoint(attend)(queries, keys, values)
    return out


_NAME = "scaled_dot_product_attention"
_original = getattr(base, _NAME)


def _dispatch(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any = None, sinks: Any = None
) -> Any:
    if hasattr(cache, "attend"):
        return cache.attend(queries, keys, values, scale, mask, sinks)
    if cache is None and (out := in_blocks(queries, keys, values, scale, mask, sinks)) is not None:
        return out
    return _original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


def install() -> None:
    """Replace the attention function in every model module imported so far; call it after a model's module was
    imported.

    Each module imported the function by name, so changing `models.base` alone would have no effect.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _NAME, None) is _original:
            setattr(module, _NAME, _dispatch)
