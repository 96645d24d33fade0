"""Sends the attention calls of mlx-lm's model modules to the cache that they are given, or without a cache to
`unpaged`.
"""

from __future__ import annotations

import sys
from typing import Any

from mlx_lm.models import base

from mlx_tandem.model.attention import unpaged

_NAME = "scaled_dot_product_attention"
_original = getattr(base, _NAME)


def _dispatch(
    queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any = None, sinks: Any = None
) -> Any:
    if hasattr(cache, "attend"):
        return cache.attend(queries, keys, values, scale, mask, sinks)
    if cache is None and (out := unpaged.in_blocks(queries, keys, values, scale, mask, sinks)) is not None:
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
