"""Check of the kernel that adds and norms: it must agree with MLX's own operations."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernels.add_norm import AddNorm, Norm
from mlx_tandem.model.ops.checking import Rejected, checked, relative_error

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Largest difference by type: two steps of a number of the largest size."""

ROWS = 5


PARTS = (2, 4)
"""Numbers of parts of the second array in the check, which are those of `ops/products/wgmma.py`."""


def problem(kernel: AddNorm, norm: Norm, *, divided: bool = False) -> str:
    """Return why the kernel must not be used for norms of this kind; empty if it may.

    divided: whether the second array may be given in parts.
    """

    def check() -> str:
        error = largest_error(kernel, norm, divided=divided)
        if not error <= TOLERANCE[norm.weight.dtype]:
            raise Rejected(f"the kernel is wrong by {error:.1e} in {norm.weight.dtype}")
        return ""

    return checked("the kernel that adds and norms", check, lambda reason: reason)


def largest_error(kernel: AddNorm, norm: Norm, *, divided: bool = False) -> float:
    """Return the largest relative difference between the kernel's results and those of MLX's own operations."""
    rng = np.random.default_rng(0)
    dim, dtype = norm.weight.size, norm.weight.dtype
    a, *others = mx.array(rng.standard_normal((1 + max(PARTS), ROWS, 1, dim)).astype(np.float32))
    a, error = a.astype(dtype), 0.0
    for count in (0, *PARTS) if divided else (0,):
        parts = mx.stack(others[: count or 1])
        b = parts.sum(0).astype(dtype)
        got = kernel(a, parts if count else b, norm)
        want = a + b, mx.fast.rms_norm(a + b, norm.weight, norm.epsilon)
        error = max(error, *(relative_error(*each) for each in zip(got, want, strict=True)))
    return error
