"""The device under the model, and what depends on whether it is the CPU, a GPU of NVIDIA or one of Apple.

`base` says what can be asked, and `cpu`, `cuda` and `metal` have the answers with their reasons.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.backend.base import Backend, Target
from mlx_tandem.model.backend.cpu import CPU
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.backend.metal import METAL

__all__ = ["Backend", "Target", "current"]


def current() -> Backend:
    """Return the back end of MLX's default device. Tests put another one in the place of this function."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return CPU
    return METAL if mx.metal.is_available() else CUDA
