"""Depthwise convolutions of recurrent layers as sums of shifted inputs.

MLX computes such a convolution as one small product for each channel where it has no kernel for it. On a CPU this takes
up to ten times as long as a sum of the shifted inputs times their weights, which is one elementwise operation. Metal
has a kernel.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model import backend
from mlx_tandem.model.mixin import mix_in


class DepthwiseBySum:
    """Mixin of a depthwise convolution over positions."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the convolution [rows, length - width + 1, channels] of x [rows, length, channels]."""
        own: nn.Conv1d = self  # type: ignore[assignment]
        y = _sum_of_shifts(x, own.weight)
        return y + own.bias if "bias" in own else y


@mx.compile
def _sum_of_shifts(x: mx.array, weight: mx.array) -> mx.array:
    width = weight.shape[1]
    length = x.shape[1] - width + 1
    # Each shifted view is converted to float32, not the whole input, so that MLX fuses everything into one operation.
    # The sum is rounded to the input's type once, as in MLX's convolution.
    terms = [x[:, i : i + length].astype(mx.float32) * weight[:, i, 0].astype(mx.float32) for i in range(width)]
    return sum(terms[1:], terms[0]).astype(x.dtype)


def speed_up(model: nn.Module) -> None:
    """Have the model's depthwise convolutions computed as sums of shifted inputs, unless MLX has a kernel for
    them.
    """
    if backend.current().kernels.mlx_has_its_own:
        return
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and not isinstance(module, DepthwiseBySum) and _is_depthwise(module):
            mix_in(module, DepthwiseBySum)


def _is_depthwise(conv: nn.Conv1d) -> bool:
    channels, _, own = conv.weight.shape
    plain = conv.stride == 1 and conv.padding == 0 and conv.dilation == 1
    return plain and own == 1 and conv.groups == channels
