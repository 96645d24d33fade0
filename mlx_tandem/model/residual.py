"""A fused path on CUDA through the layers of a transformer: one kernel adds a part's output and norms the sum.

Between the layers the sum belongs to one layer and the norm to the next. So a layer hands its normed sum to that norm,
which returns it when it is called with this very sum. A layer's own code is kept for devices and models without the
path. The known kinds of layers are those whose code was read: attention behind a norm, a sum, an MLP behind a norm, a
sum, and nothing else.

In a step with few tokens a row, neighbouring layers hand on arrays [tokens, dim] instead of [rows, length, dim]. For an
input with three axes, MLX adds a reshape before and after each product. A reshape costs a GPU nothing, but costs the
host as much as launching a small kernel (docs/decisions/gpu-steps.md).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next

from mlx_tandem.model import backend
from mlx_tandem.model.attention.fused_block import FusedBlock
from mlx_tandem.model.delta_net import FusedDeltaNet
from mlx_tandem.model.kernel_checks import residual as check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.add_norm import EACH, AddNorm, Norm
from mlx_tandem.model.linears.skinny import FewRows, find_few_rows
from mlx_tandem.model.mixin import mix_in

log = logging.getLogger(__name__)

MIXED = (qwen3_next.Qwen3NextDecoderLayer, qwen3_5.DecoderLayer)
"""The known layers of mlx-lm whose attention is `linear_attn` if they are linear."""

KINDS = (
    llama.TransformerBlock,
    qwen2.TransformerBlock,
    qwen3.TransformerBlock,
    qwen3_moe.Qwen3MoeDecoderLayer,
    *MIXED,
)
"""The known layers of mlx-lm."""


MOST_TOKENS = 512
"""Most tokens for which the kernel is used. It saves the host's time. With more tokens the host is not the limit, and
MLX's sum reuses the memory of an input, which the kernel cannot."""

BY_TOKENS = (FusedBlock, FusedDeltaNet)
"""Mixins of attention and gated delta nets that accept [tokens, dim] in steps where `takes_tokens` returns True."""


class Parts(NamedTuple):
    """The parts of a layer that the path needs. `following`: the norm behind the layer."""

    attention: nn.Module
    middle: Norm
    following: nn.Module


class Handed:
    """The sum that a layer handed to a norm, with its normed numbers.

    Attributes:
        lead: (rows, length) of the step, which cannot be read from the shape of a sum [tokens, dim].
    """

    def __init__(self) -> None:
        self.lead = (0, 0)
        self._sum: mx.array | None = None
        self._normed: mx.array | None = None

    def put(self, total: mx.array, normed: mx.array, lead: tuple[int, int]) -> None:
        """Keep a sum and its norm."""
        self._sum, self._normed, self.lead = total, normed, lead

    def take(self, x: mx.array) -> mx.array | None:
        """Forget what was handed; return the normed numbers if x is the sum."""
        total, normed, self._sum, self._normed = self._sum, self._normed, None, None
        return normed if total is x else None


def install(model: nn.Module) -> None:
    """Let the model's layers of known kinds take the path if this device can run it and its results are right."""
    here = backend.current().kernels
    if here.target is None or not here.joins_operations:
        return
    layers = fusable(model)
    if not layers:
        return
    kernel, few = AddNorm(dialect.maker(here.target)), find_few_rows(model)
    if problem := check.problem(kernel, layers[0][1].middle, divided=few is not None and few.divides):
        log.warning("sums and norms run apart: %s", problem)
    else:
        use(layers, kernel)
        log.info("sums and norms of %d layers run as one", len(layers))


def fusable(model: nn.Module) -> list[tuple[nn.Module, Parts]]:
    """Return the model's layers that can take the path, each with the parts that it needs."""
    found = []
    for layers, last in _stacks(model):
        for layer, after in pairwise([*layers, None]):
            following: Any = last if after is None else after.input_layernorm if type(after) in KINDS else None
            if type(layer) in KINDS and _is_plain(layer.post_attention_layernorm) and _is_plain(following):
                attention = layer.linear_attn if type(layer) in MIXED and layer.is_linear else layer.self_attn
                found.append((layer, Parts(attention, _norm(layer.post_attention_layernorm), following)))
    return found


def use(layers: Sequence[tuple[nn.Module, Parts]], kernel: AddNorm) -> None:
    """Let these layers take the path from here on."""
    norms = {id(layer.input_layernorm) for layer, parts in layers if isinstance(parts.attention, BY_TOKENS)}
    for layer, parts in layers:
        own: Any = layer
        own._parts, own._add_norm, own._few_rows = parts, kernel, find_few_rows(layer)
        own._hands_tokens = id(parts.following) in norms
        mix_in(layer, FusedLayer)
        following: Any = parts.following
        following._handed = Handed()
        mix_in(following, HandedNorm)


def _stacks(model: nn.Module) -> Iterator[tuple[list[Any], Any]]:
    """Yield the layers of each stack of layers in the model, with the norm behind the last."""
    for module in model.modules():
        layers = module.get("layers")
        if isinstance(layers, list) and layers:
            yield layers, module.get("norm")


def _is_plain(norm: Any) -> bool:
    """Return whether a module is an RMS norm of mlx.nn that the kernel can compute."""
    return type(norm) is nn.RMSNorm and norm.weight.dtype in (mx.bfloat16, mx.float16) and not norm.weight.size % EACH


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, float(norm.eps))


class FusedLayer:
    """Mixin of a layer that takes the path."""

    _parts: Parts
    _add_norm: AddNorm
    _few_rows: FewRows | None
    """The kernels of the layer's linears, which may return an output as parts."""

    _hands_tokens: bool
    """Whether the next layer's attention can accept [tokens, dim], so that this layer may return that shape."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Return the layer's output for x [rows, length, dim], or for x [tokens, dim] from the layer before."""
        layer: Any = self
        attention, middle, following = self._parts
        norm: Any = layer.input_layernorm
        lead = (x.shape[0], x.shape[1]) if x.ndim == 3 else norm._handed.lead
        if x.ndim == 3 and isinstance(attention, BY_TOKENS) and attention.takes_tokens(x, lead[1], mask, cache):
            x = x.reshape(-1, x.shape[-1])
        total, normed = self._added(x, self._attended(norm(x), lead, mask, cache), middle, x.shape)
        shape = x.shape if self._hands_tokens else (*lead, x.shape[-1])
        total, normed = self._added(total, layer.mlp(normed), _norm(following), shape)
        handed: Any = following
        handed._handed.put(total, normed, lead)
        return total

    def _attended(self, x: mx.array, lead: tuple[int, int], mask: mx.array | None, cache: Any) -> mx.array:
        """Return the attention's output for x, in the shape of x.

        If the attention does not accept [tokens, dim], x is reshaped to three axes for the call.
        """
        attention: Any = self._parts.attention
        if x.ndim == 3 or attention.takes_tokens(x, lead[1], mask, cache):
            attended: mx.array = attention(x, mask, cache)
            return attended
        apart: mx.array = attention(x.reshape(*lead, -1), mask, cache)
        return apart.reshape(x.shape)

    def _added(self, a: mx.array, b: mx.array, norm: Norm, shape: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return a + b and its norm, both reshaped to `shape`. The kernel is for few tokens of the weight's type."""
        few = a.size <= MOST_TOKENS * a.shape[-1]
        if few and a.dtype == b.dtype == norm.weight.dtype and a.shape == b.shape:
            parts = None if self._few_rows is None else self._few_rows.take_parts(b)
            return self._add_norm(a, b if parts is None else parts, norm, shape)
        total = (a + b).reshape(shape)
        return total, mx.fast.rms_norm(total, norm.weight, norm.epsilon)


class HandedNorm:
    """Mixin of a norm whose input comes from a layer that has normed it already."""

    _handed: Handed

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of x: what was handed with x, or its own result."""
        normed = self._handed.take(x)
        return super().__call__(x) if normed is None else normed  # type: ignore[misc]
