"""Replaces mlx-lm's `gated_delta_ops` by a kernel on CUDA, where mlx-lm has none.

mlx-lm's operations are a loop over tokens, about ten operations each, most of them over the whole state. The kernel
reads and writes the state once for all tokens. Only layers that are called within `using_kernel` use it; trainers keep
mlx-lm's operations, which have a gradient.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta

from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.states import StateCache
from mlx_tandem.model.kernel_checks import gated_delta as check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.gated_delta import GatedDelta, RuleInputs, fits

log = logging.getLogger(__name__)

_original = gated_delta.gated_delta_ops
_caches: list[StateCache] = []  # of the layers that are being called, the innermost last


@cache
def kernel() -> GatedDelta | None:
    """Return the kernel, if the default device can run it and lacks mlx-lm's; it is checked first."""
    if dialect.available() != ("cuda",):
        return None
    make = dialect.maker("cuda")
    if problem := check.problem(make):
        log.warning("MLX's own operations compute the gated delta rule: the kernel is %s", problem)
        return None
    log.info("gated delta rule: the kernel is right")
    return GatedDelta(make)


@contextmanager
def using_kernel(cache: StateCache) -> Iterator[None]:
    """Within this context, mlx-lm's `gated_delta_ops` uses the kernel, for the layer with this cache."""
    _caches.append(cache)
    try:
        yield
    finally:
        _caches.pop()


def install(model: nn.Module) -> None:
    """Replace mlx-lm's operations within `using_kernel`, if the model has layers that use them."""
    if any(hasattr(sys.modules[type(m).__module__], "gated_delta_update") for m in model.modules()):
        kernel()  # it is checked here, since no array can be evaluated while a step is traced
        gated_delta.gated_delta_ops = _dispatch


def _dispatch(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    inputs = RuleInputs(q, k, v, g, beta)
    found = kernel() if _caches and state is not None and mask is None and fits(inputs) else None
    if found is None or state is None:
        result: tuple[mx.array, mx.array] = _original(q, k, v, g, beta, state, mask)
        return result
    lines = _caches[-1].lines_of(state) if inplace.writing().store is not None else None
    if lines is None:
        return found(inputs, state)
    y = found.in_place(inputs, lines.pool, lines.read, lines.write)
    _caches[-1].wrote(lines)
    return y, state
