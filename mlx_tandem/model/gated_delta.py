"""Sends the gated delta rule of mlx-lm's recurrent layers to the kernel, on devices for which mlx-lm has none.

mlx-lm has a kernel for Metal. Elsewhere it computes one token after another by operations, each of which reads or
writes the whole state. On CUDA the layers that are served use the kernel, which reads and writes it once for all
tokens. Trainers, and whoever else calls a model's modules, use mlx-lm's operations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
from mlx_lm.models import gated_delta

from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.states import StateCache
from mlx_tandem.model.kernel_checks import gated_delta as check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.gated_delta import GatedDelta, Given, fits

log = logging.getLogger(__name__)

_original = gated_delta.gated_delta_ops
_served: list[StateCache] = []  # the cache of the layer that is being called


@cache
def kernel() -> GatedDelta | None:
    """Return the kernel, if the default device can run it and lacks mlx-lm's; it is checked first."""
    if dialect.available() != ("cuda",):
        return None
    make = dialect.maker("cuda")
    if problem := check.problem(make):
        log.warning("MLX's own operations compute the gated delta rule: the kernel is %s", problem)
        return None
    return GatedDelta(make)


@contextmanager
def serving(layer: StateCache) -> Iterator[None]:
    """Let the layer with this cache use the kernel while it is called in this context."""
    _served.append(layer)
    try:
        yield
    finally:
        _served.pop()


def install() -> None:
    """Put the dispatch in the place of mlx-lm's operations; it changes nothing outside of `serving`."""
    kernel()  # it is checked here, since nothing can be evaluated while a step is traced
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
    given = Given(q, k, v, g, beta)
    if not _served or mask is not None or not fits(given) or (found := kernel()) is None:
        result: tuple[mx.array, mx.array] = _original(q, k, v, g, beta, state, mask)
        return result
    place = _served[-1].place_of(state) if state is not None and inplace.writing().store is not None else None
    if place is None:
        return found(given, state)
    assert state is not None
    y, done = found.in_place(given, place.pool, place.read, place.write)
    _served[-1].wrote(place, done)
    return y, state
