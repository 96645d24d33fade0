"""Convolutions of recurrent layers as sums of shifted inputs.

Each channel of such a convolution sees its own last few inputs. MLX computes it as one small product for each channel,
which is slow on CUDA and on a CPU. A sum of the shifted inputs times their weights is one elementwise kernel.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.mixin import mix_in


class ByShifts:
    """Mixin of a convolution over positions whose channels are apart."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the convolution [rows, length - width + 1, channels] of x [rows, length, channels]."""
        own: nn.Conv1d = self  # type: ignore[assignment]
        y = _sum_of_shifts(x, own.weight)
        return y + own.bias if "bias" in own else y


@mx.compile
def _sum_of_shifts(x: mx.array, weight: mx.array) -> mx.array:
    width = weight.shape[1]
    length = x.shape[1] - width + 1
    # Views are converted, not the whole, so that all of it is one kernel; it rounds once, as MLX's convolution does.
    terms = [x[:, i : i + length].astype(mx.float32) * weight[:, i, 0].astype(mx.float32) for i in range(width)]
    return sum(terms[1:], terms[0]).astype(x.dtype)


def speed_up(model: nn.Module) -> None:
    """Have the model's convolutions computed by shifts where their channels are apart."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d) and not isinstance(module, ByShifts) and _is_apart(module):
            mix_in(module, ByShifts)


def _is_apart(conv: nn.Conv1d) -> bool:
    channels, _, own = conv.weight.shape
    plain = conv.stride == 1 and conv.padding == 0 and conv.dilation == 1
    return plain and own == 1 and conv.groups == channels
