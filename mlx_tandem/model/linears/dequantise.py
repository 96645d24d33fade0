"""Quantised linears that multiply by a dequantised weight where that is faster than a product of the packed one.

A kernel for packed weights may be made for few tokens: one of 4 bits took 75 µs for one row on an H200, 246 for eight,
635 for 32. With more tokens, taking the weight apart first, into memory, and leaving the product to the kernels for
plain weights can be faster. Whether it is, tuning.py measures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.mixin import mix_in

GAIN = 0.95
"""Of the packed product's time; what is not faster by so much is not worth the memory."""


def dequantised(linear: nn.QuantizedLinear, x: mx.array) -> mx.array:
    """What the linear gives for x [..., inputs], by way of its weight in x's precision."""
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
    """By the seconds that products of so many tokens took: from how many tokens on the dequantised weight is faster
    at every number that was measured; None: it is not."""
    found = None
    for tokens in sorted(packed, reverse=True):
        if plain[tokens] >= GAIN * packed[tokens]:
            break
        found = tokens
    return found


def use_from(linear: nn.QuantizedLinear, tokens: int) -> None:
    """From here on the linear's calls with at least so many tokens dequantise."""
    module: Any = linear
    module._dequantise_from = tokens
    mix_in(module, Dequantising)


class Dequantising:
    """Mixed into a quantised linear."""

    _dequantise_from: int

    def __call__(self, x: mx.array) -> mx.array:
        if x.size // x.shape[-1] >= self._dequantise_from:
            return dequantised(self, x)  # type: ignore[arg-type]
        y: mx.array = super().__call__(x)  # type: ignore[misc]
        return y
