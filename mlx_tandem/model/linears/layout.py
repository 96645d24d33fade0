"""The layout of linears' weights in a CPU's memory.

A linear multiplies its input by the transpose of its weight. Where the transpose lies in memory row by row, OpenBLAS
computes the products of one to some dozens of tokens in 0.6 to 0.9 of the time (docs/decisions/cpu-arithmetic.md).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn


def lay_out(module: nn.Module) -> None:
    """Lay the float32 weights of all linears out in this way, one after the other; their values and shapes stay."""
    for each in module.modules():
        own: Any = each
        if isinstance(each, nn.Linear) and own.weight.dtype == mx.float32:
            own.weight = mx.contiguous(own.weight.T).T
            mx.eval(own.weight)
