"""Rotary positions on the CPU back end: the angles of a step are computed once and used by all layers.

MLX has a kernel for `mx.fast.rope` on GPUs only. On a CPU every call computes frequencies, angles, cosines and sines
again, which is a quarter of all operations of a small model's decode step.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.model.ops.attention.cache import arange

Angles = tuple[mx.array, mx.array]


class SharedAngles:
    """The cosines and sines of the forward that is being traced, for each kind of rope in the model."""

    def __init__(self, model: nn.Module):
        self._offset: mx.array | None = None
        self._made: dict[tuple[Any, ...], Angles] = {}
        for module in model.modules():
            if type(module) in (nn.RoPE, _SharedRope) and not module.traditional:
                rope: Any = module
                rope._angles = self
                rope.__class__ = _SharedRope

    def clear(self) -> None:
        """Drop the arrays of a forward that is over."""
        self._offset = None
        self._made.clear()

    def get(self, offset: mx.array, length: int, dims: int, base: float, scale: float) -> Angles:
        """Return cosines and sines [rows, 1, length, dims / 2] of the positions that begin at offset [rows]."""
        if self._offset is not offset:
            self.clear()
            self._offset = offset
        key = (length, dims, base, scale)
        if key not in self._made:
            half = dims // 2
            # The same float32 arithmetic as MLX's own, so that both agree to the last bits at long positions.
            frequency = mx.exp(mx.array(-np.arange(half, dtype=np.float32)) * (np.log(base).item() / half))
            position = (offset[:, None] + arange(length)).astype(mx.float32) * scale
            angle = position[:, None, :, None] * frequency
            self._made[key] = mx.cos(angle), mx.sin(angle)
        return self._made[key]


class _SharedRope(nn.RoPE):
    """A rope that takes its angles from SharedAngles."""

    _angles: SharedAngles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.ndim != 4:
            return super().__call__(x, offset)  # type: ignore[no-any-return]
        cos, sin = self._angles.get(offset, x.shape[2], self.dims, self.base, self.scale)
        half = self.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : self.dims].astype(mx.float32)
        turned = [(a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)]
        rest = [x[..., self.dims :]] if self.dims < x.shape[-1] else []
        return mx.concatenate(turned + rest, axis=-1)
