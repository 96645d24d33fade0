"""A fused path on a GPU through layers of Qwen3.5's kind, which compute the gated delta rule.

One kernel computes the inputs of the rule from the layer's products, the rule's kernel follows, and one kernel computes
the norm behind it. A layer's own code is kept and runs whenever the fused path cannot: for rows that begin, for long
chunks of prompts, and to verify drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_5

from mlx_tandem.model import backend, gated_delta
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.states import PoolLines, StateCache
from mlx_tandem.model.kernel_checks import delta_net as check
from mlx_tandem.model.kernel_checks.frame import Verdict
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.delta_net import DeltaNetInputs, GatedNorm, Mixer, Product
from mlx_tandem.model.kernels.gated_delta import GatedDelta
from mlx_tandem.model.linears.merged import Merged, home_of
from mlx_tandem.model.mixin import mix_in, unmix

log = logging.getLogger(__name__)

MOST_TOKENS = 8
"""Most tokens of a row on the fused path. Its first kernel takes the tokens of a row one after the other, so MLX's own
operations are faster for long rows."""

verdict = Verdict()
"""The result of the checks of the fused path. It says why layers that could take this path run mlx-lm's code."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of the fused path."""

    inputs: DeltaNetInputs
    rule: GatedDelta
    norm: GatedNorm

    @classmethod
    def made(cls, make: dialect.Make, rule: GatedDelta) -> Kernels:
        """Return the kernels: those that `make` makes, and the given kernel of the rule."""
        return cls(DeltaNetInputs(make), rule, GatedNorm(make))


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a layer that the fused path needs. `merged`: its four linears as one, if they were merged."""

    mixer: Mixer
    merged: Merged | None


def install(model: nn.Module) -> None:
    """Make the model's layers of known kinds take the fused path if this device can run it, its results are right, and,
    on Metal, it is faster.
    """
    layers = fusable(model)
    kernels = _kernels() if layers else None
    if kernels is None:
        return

    def find_problem() -> str:
        must_be_faster = backend.current().kernels.mlx_has_its_own
        return _problem(layers, kernels, check.seconds(layers[0][0]) if must_be_faster else None)

    if problem := verdict.reach(find_problem):
        log.warning("gated delta nets run their own code: %s", problem)
    else:
        use(layers, kernels)
        log.info("gated delta nets: the fused path is used")


def wrong(model: nn.Module) -> str:
    """Return what is wrong with the fused path that another process chose for this model; empty if nothing is."""
    layers = fusable(model) if verdict.was_given else []
    kernels = _kernels() if layers else None
    return "" if kernels is None else _problem(layers, kernels, None)


def _kernels() -> Kernels | None:
    """Return the kernels of the fused path, if this device can run them."""
    rule = gated_delta.kernel()
    if rule is None or inplace.writing().store is None:
        return None
    (target,) = dialect.available()
    return Kernels.made(dialect.maker(target), rule)


def _problem(layers: Sequence[tuple[nn.Module, Parts]], kernels: Kernels, own: float | None) -> str:
    """Return why layers must not take the fused path, which they are given for this check only; empty if they may.

    own: the seconds of the first layer's own code, which the fused path has to beat; None: the path is not timed.
    """
    use(layers, kernels)
    try:
        return check.problem(layers[0][0], own)
    finally:
        for layer, _ in layers:
            unmix(layer)


def fusable(model: nn.Module) -> list[tuple[nn.Module, Parts]]:
    """Return the model's layers of known kinds that can take the fused path, each with the parts that it needs."""
    found = [(m, _parts(m)) for m in model.modules() if type(m) is qwen3_5.GatedDeltaNet]
    return [(module, parts) for module, parts in found if parts is not None]


def use(layers: Sequence[tuple[nn.Module, Parts]], kernels: Kernels) -> None:
    """Let these layers take the fused path from here on whenever their cache offers it."""
    for module, parts in layers:
        own: Any = module
        own._parts, own._kernels = parts, kernels
        mix_in(module, FusedDeltaNet)


def _parts(layer: Any) -> Parts | None:
    """Return what the fused path needs of a layer; None if the kernels do not support its dimensions or types."""
    dim, dtype = layer.head_k_dim, layer.conv1d.weight.dtype
    weights = layer.dt_bias, layer.norm.weight
    if dim != layer.head_v_dim or dim % 32 or dim > 256 or any(w.dtype != dtype for w in weights):
        return None
    if layer.sharding_group is not None or layer.conv_kernel_size < 2 or "bias" in layer.conv1d:
        return None
    mixer = Mixer(
        layer.conv1d.weight,
        layer.A_log,
        layer.dt_bias,
        layer.norm.weight,
        float(layer.norm.eps),
        layer.num_k_heads,
        layer.num_v_heads,
        dim,
    )
    return Parts(mixer, home_of(_linears(layer)))


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    """Return the linears of queries, keys and values, of the decay, of the strength, and of the gates."""
    return layer.in_proj_qkv, layer.in_proj_a, layer.in_proj_b, layer.in_proj_z


class FusedDeltaNet:
    """Mixin of a layer that takes the fused path when its cache offers it."""

    _parts: Parts
    _kernels: Kernels

    def takes_tokens(self, x: mx.array, length: int, mask: mx.array | None, cache: Any) -> bool:
        """Return whether the layer takes x as [tokens, dim] in a step whose rows have this length."""
        return _offered(x, length, mask, cache, self._parts.mixer) is not None

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Return the layer's output, by the fused path if the cache offers it.

        inputs: [rows, length, dim], or [rows · length, dim] where `takes_tokens` says so.
        """
        mixer = self._parts.mixer
        length = inputs.shape[1] if inputs.ndim == 3 else 1  # with two axes, `takes_tokens` has checked the length
        lines = _offered(inputs, length, mask, cache, mixer)
        if lines is None:
            output: mx.array = super().__call__(inputs, mask, cache)  # type: ignore[misc]
            return output
        layer: Any = self
        (products, state), kernels = lines, self._kernels
        qkv, a, b, z = self._products(inputs)
        given = kernels.inputs(mixer, (qkv, a, b), products.pool, products.read, products.write)
        y = kernels.rule.in_place(given, state.pool, state.read, state.write)
        cache.wrote(products, state)
        output = layer.out_proj(kernels.norm(mixer, y, z))
        return output

    def _products(self, x: mx.array) -> list[Product]:
        """Return the products of `_linears`: parts of one array if they are merged and no adapter changes any of them.

        Otherwise each product is an array of its own.
        """
        linears, merged = _linears(self), self._parts.merged
        if merged is None or not merged.joins(x) or any(getattr(own, "is_changed", False) for own in linears):
            return [Product(own(x)) for own in linears]
        whole = merged.whole(x)
        return [Product(whole, at) for at in merged.places(linears)[:-1]]


def _offered(
    x: mx.array, length: int, mask: mx.array | None, cache: Any, mixer: Mixer
) -> tuple[PoolLines, PoolLines] | None:
    """Return the lines of the last products and of the state of the rule, if the fused path can use them for x."""
    if not isinstance(cache, StateCache) or mask is not None or length > MOST_TOKENS:
        return None
    products, state = cache.lines(0), cache.lines(1)
    if products is None or state is None:
        return None
    types = x.dtype, products.pool.dtype
    return (products, state) if all(dtype == mixer.weight.dtype for dtype in types) else None
