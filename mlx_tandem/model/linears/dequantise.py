"""Quantised linears that multiply by a dequantised weight where that is faster than a product of the packed one.

A kernel for packed weights may be made for few tokens: a 4-bit one took 75 µs for one row on an H200, 246 for eight,
635 for 32. With more tokens it can be faster to unpack the weight into memory first and to leave the product to the
kernels for plain weights. tuning.py measures whether it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.modules import mix_in

GAIN = 0.95
"""Longest time with a dequantised weight, as a share of the packed product's time, that is worth the memory."""


def dequantised(linear: nn.QuantizedLinear, x: mx.array) -> mx.array:
    """Return the linear's output for x [..., inputs] by way of its weight in x's type."""
    weight = mx.dequantize(
        linear["weight"],
        linear["scales"],
        linear.get("biases"),
        linear.group_size,
        linear.bits,
        linear.mode,
        dtype=x.dtype,
    )
    y = x @ weight.T
    return y + linear["bias"] if "bias" in linear else y


def worth_from(packed: Mapping[int, float], plain: Mapping[int, float]) -> int | None:
    """Return from how many tokens on the dequantised weight is faster at every measured number; None if it is not.

    `packed` and `plain` are the measured seconds by number of tokens.
    """
    found = None
    for tokens in sorted(packed, reverse=True):
        if plain[tokens] >= GAIN * packed[tokens]:
            break
        found = tokens
    return found


def use_from(linear: nn.QuantizedLinear, tokens: int) -> None:
    """Have the linear dequantise its weight in calls with at least `tokens` tokens."""
    module: Any = linear
    module._dequantise_from = tokens
    mix_in(module, Dequantising)


class Dequantising:
    """Mixin of a quantised linear that dequantises for many tokens."""

    _dequantise_from: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output, by a dequantised weight if there are enough tokens."""
        if x.size // x.shape[-1] >= self._dequantise_from:
            return dequantised(self, x)  # type: ignore[arg-type]
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        return y
