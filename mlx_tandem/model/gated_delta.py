"""Replaces mlx-lm's functions for the gated delta rule by a kernel that reads and writes states in the pool.

On CUDA mlx-lm has operations only: a loop over tokens, about ten operations each, most of them over the whole state.
The kernel computes all rows there. On Metal mlx-lm has a kernel of its own, whose states are gathered from the pool and
written back. There mlx-lm's kernel computes rows that begin a sequence and long chunks, and the kernel in the pool
computes short rows that continue a sequence. Only layers that are called within `using_kernel` use the kernel in the
pool; trainers use mlx-lm's functions, which have a gradient.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import gated_delta

from mlx_tandem.model import backend
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.states import StateCache
from mlx_tandem.model.kernel_checks import gated_delta as check
from mlx_tandem.model.kernel_checks.frame import Verdict
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.gated_delta import GatedDelta, RuleInputs, fits

log = logging.getLogger(__name__)

MOST_TOKENS = 8
"""Most tokens of a row that the kernel computes where mlx-lm has a kernel. Longer rows spend their time in the rule and
not in moving states, and mlx-lm's kernel has a form for them."""

verdict = Verdict()
"""The result of the checks of the kernel. It says why mlx-lm's functions compute the rule instead."""

Rule = Callable[..., tuple[mx.array, mx.array]]
"""Function with the arguments of mlx-lm's `gated_delta_ops`, which returns the outputs and the states after."""

_operations: Rule = gated_delta.gated_delta_ops
_kernel: Rule = gated_delta.gated_delta_kernel
_caches: list[StateCache] = []  # of the layers that are being called, the innermost last


@cache
def kernel() -> GatedDelta | None:
    """Return the kernel, if the default device can run it; it is checked first, and timed where mlx-lm has a kernel."""
    targets = dialect.available()
    if not targets:
        return None
    make = dialect.maker(targets[0])
    if problem := verdict.reach(lambda: _problem(make)):
        log.warning("mlx-lm's own functions compute the gated delta rule: the kernel is %s", problem)
        return None
    log.info("gated delta rule: the kernel is used")
    return GatedDelta(make)


def wrong(model: nn.Module) -> str:
    """Return what is wrong with the kernel that another process chose for this model; empty if nothing is."""
    if not verdict.was_given or not _is_used_by(model):
        return ""
    return "".join(check.problem(dialect.maker(target)) for target in dialect.available()[:1])


def _problem(make: dialect.Make) -> str:
    """Return why the kernel made by `make` must not be used on this device; empty if it may."""
    if not backend.current().kernels.mlx_has_its_own:
        return check.problem(make)
    store = inplace.writing().store
    if store is None:
        return "not used: MLX's own operations write the states"
    return check.problem(make, _operations if gated_delta._gated_delta_kernel is None else _kernel, store)


@contextmanager
def using_kernel(cache: StateCache) -> Iterator[None]:
    """Within this context, mlx-lm's functions use the kernel, for the layer with this cache."""
    _caches.append(cache)
    try:
        yield
    finally:
        _caches.pop()


def install(model: nn.Module) -> None:
    """Replace mlx-lm's functions within `using_kernel`, if the model has layers that use them."""
    if _is_used_by(model):
        kernel()  # it is checked here, since no array can be evaluated while a step is traced
        only_in_pool = backend.current().kernels.mlx_has_its_own
        gated_delta.gated_delta_ops = _replacing(_operations, only_in_pool=only_in_pool)
        gated_delta.gated_delta_kernel = _replacing(_kernel, only_in_pool=only_in_pool)


def _is_used_by(model: nn.Module) -> bool:
    return any(hasattr(sys.modules[type(m).__module__], "gated_delta_update") for m in model.modules())


def _replacing(own: Rule, *, only_in_pool: bool) -> Rule:
    """Return a function that uses the kernel where it can, and mlx-lm's function `own` elsewhere.

    only_in_pool: whether `own` computes rows of more than MOST_TOKENS and rows whose states are not in the pool.
    """

    def rule(
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
        if found is None or state is None or (only_in_pool and q.shape[1] > MOST_TOKENS):
            return own(q, k, v, g, beta, state, mask)
        lines = _caches[-1].lines_of(state) if inplace.writing().store is not None else None
        if lines is None:
            return own(q, k, v, g, beta, state, mask) if only_in_pool else found(inputs, state)
        y = found.in_place(inputs, lines.pool, lines.read, lines.write)
        _caches[-1].wrote(lines)
        return y, state

    return rule
