"""The modules of a model that use the states of its recurrent layers, and their depthwise convolutions.

The modules are found by a forward that is never evaluated.

MLX computes a depthwise convolution as one small product for each channel where it has no kernel for it. On a CPU this
takes up to ten times as long as a sum of the shifted inputs times their weights, which is one elementwise operation.
Metal has a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from mlx_tandem.model import backend
from mlx_tandem.model.cache.states import StateCache, StateShape, StateView, arranged, keeps_state, leaves
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.modules import mix_in, unmix
from mlx_tandem.model.ops import gated_delta
from mlx_tandem.model.ops.attention.cache import ProbeCache
from mlx_tandem.model.probe import Examined

NO_DRAFTS = "keeps a state inside of its attention, which would have to follow drafts one by one"
"""The reason why drafts are not supported for a family, in words."""

_met: list[tuple[nn.Module, ArraysCache]] = []


class _Noting:
    """Mixin of a module that notes the states that it is called with."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own: Any = self
        _met.extend((own, value) for value in (*args, *kwargs.values()) if isinstance(value, ArraysCache))
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class ServedRecurrent:
    """Mixin of a module that reads and writes a state: it enables the kernels of states during the call, and computes
    the tokens of a row one after another when drafts are verified.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output."""
        plain = super().__call__  # type: ignore[misc]
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StateCache)), None)
        if cache is None:
            return plain(*args, **kwargs)
        with gated_delta.using_kernel(cache):
            return plain(*args, **kwargs) if cache.turns is None else cache.turns.run(cache, plain, args, kwargs)


def recurrent_modules(model: nn.Module) -> list[nn.Module] | None:
    """Return the innermost modules that are called with a state.

    Return None if a state is used elsewhere, for example by attention that convolves its keys: then the tokens of a row
    cannot be computed one after another without the rest of the layer.
    """
    module: Any = model
    caches = list(leaves(make_prompt_cache(module)))
    states = [cache for cache in caches if keeps_state(cache)]
    probes = [ProbeCache() for cache in caches if not keeps_state(cache)]
    noting = [
        m
        for m in module.modules()
        if isinstance(m, ServedRecurrent) or "cache" in signature(type(m).__call__).parameters
    ]
    for m in noting:
        mix_in(m, _Noting)
    try:
        module(mx.zeros((1, 1), mx.int32), cache=arranged(module, probes, states))
    finally:
        for m in noting:
            unmix(m)
        met, _met[:] = list(_met), []
    callers = {id(m) for m, _ in met}
    inner = {id(m): m for m, _ in met if not any(id(part) in callers and part is not m for part in m.modules())}
    used = {id(state) for m, state in met if id(m) in inner}
    return list(inner.values()) if used == {id(state) for state in states} else None


def gathered_bytes(model: nn.Module, states: Sequence[StateShape]) -> int:
    """Return the bytes of states that a forward of one token gathers and writes back for each row that goes on.

    Kernels read and write the other states in the pool. Nothing is evaluated. Call it only once the model's modules are
    those that are served.
    """
    module: Any = model
    line = mx.zeros((1,), mx.int32)
    caches = [StateCache(shape) for shape in states]
    for cache in caches:
        arrays = [mx.zeros((1, width), dtype) for own in cache.shape.halves for width, dtype in own.lines()]
        cache.bind(arrays, StateView(line, line))
    probes = [ProbeCache() for cache in leaves(make_prompt_cache(module)) if not keeps_state(cache)]
    module(mx.zeros((1, 1), mx.int32), cache=arranged(module, probes, caches))
    return sum(cache.gathered_bytes() for cache in caches)


def verifies_drafts(model: LoadedModel, found: Examined) -> bool:
    """Return whether steps of a model can verify drafts."""
    return not found.states or recurrent_modules(model.module) is not None


# --- Depthwise convolutions as sums of shifted inputs ----------------------------------------------------------------


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


def speed_up_convolutions(model: nn.Module) -> None:
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
