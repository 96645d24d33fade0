"""The attention back end for every device: attention over keys and values that the cache has gathered."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model import backend

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
    return backend.current().attend(queries, keys, values, scale, mask, sinks)
