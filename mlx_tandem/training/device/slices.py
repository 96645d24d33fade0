"""Slices of device work: each is launched and waited for apart, so that others may run between two of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mlx.core as mx

from mlx_tandem.engine.pipeline import Wait

Slices = Generator[Wait, None, None]


def launched(*made: Any) -> Wait:
    """Start computing arrays, or containers of them; returns what waits for them."""
    mx.async_eval(*made)
    return lambda: mx.eval(*made)
