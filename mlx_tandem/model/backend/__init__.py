"""The device under the model, and what depends on whether it is the CPU, a GPU of NVIDIA or one of Apple.

`base` says what can be asked, and `cpu`, `cuda` and `metal` have the answers with their reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import mlx.core as mx

from mlx_tandem.model.backend.base import Backend, Target
from mlx_tandem.model.backend.cpu import CPU
from mlx_tandem.model.backend.cuda import CUDA
from mlx_tandem.model.backend.metal import METAL

__all__ = ["Backend", "Target", "current", "planning_for"]

_planned: ContextVar[Backend | None] = ContextVar("_planned", default=None)


@contextmanager
def planning_for(other: Backend) -> Iterator[None]:
    """Have `current` return the back end of another machine inside the block, where nothing may be computed."""
    token = _planned.set(other)
    try:
        yield
    finally:
        _planned.reset(token)


def current() -> Backend:
    """Return the back end of MLX's default device, or the one that a plan is for. Tests put another one in the place of
    this function.
    """
    if (planned := _planned.get()) is not None:
        return planned
    if mx.default_device().type == mx.DeviceType.cpu:
        return CPU
    return METAL if mx.metal.is_available() else CUDA
