"""Check of the kernel for SwiGLU: it must agree with mlx-lm's own function."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np
from mlx_lm.models.activations import swiglu

from mlx_tandem.model.kernels.swiglu import SwiGLU
from mlx_tandem.model.ops.checking import Rejected, checked, relative_error

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Largest relative error by type: two units in the last place of the largest number."""

ROWS = 5

SPREAD = 4.0
"""Standard deviation of the gates, so that both ends of the sigmoid are reached."""


def problem(kernel: SwiGLU, sizes: Iterable[int], dtype: mx.Dtype) -> str:
    """Return why the kernel must not be used for rows of these numbers of gates; empty if it may."""

    def check() -> str:
        for hidden in sizes:
            error = largest_error(kernel, hidden, dtype)
            if not error <= TOLERANCE[dtype]:
                raise Rejected(f"the kernel is wrong by {error:.1e} for {hidden} gates in {dtype}")
        return ""

    return checked("the kernel for SwiGLU", check, lambda reason: reason)


def largest_error(kernel: SwiGLU, hidden: int, dtype: mx.Dtype) -> float:
    """Return the largest relative difference between the kernel's results and those of mlx-lm's function."""
    rng = np.random.default_rng(0)
    gates, ups = (mx.array(rng.standard_normal((ROWS, 1, hidden)).astype(np.float32)) for _ in range(2))
    gates, ups = (gates * SPREAD).astype(dtype), ups.astype(dtype)
    return relative_error(kernel(mx.concatenate([gates, ups], axis=-1)), swiglu(gates, ups))
