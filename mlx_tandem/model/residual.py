"""A fused path on CUDA through the layers of a transformer: one kernel adds a part's output and norms the sum.

Between the layers the sum belongs to one layer and the norm to the next. So a layer hands its normed sum to that norm,
which returns it when it is called with this very sum. A layer's own code is kept for devices and models without the
path. The known kinds of layers are those whose code was read: attention behind a norm, a sum, an MLP behind a norm, a
sum, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next

from mlx_tandem.model.kernel_checks import residual as check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.add_norm import EACH, AddNorm, Norm
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


class Parts(NamedTuple):
    """The parts of a layer that the path needs. `following`: the norm behind the layer."""

    attention: nn.Module
    middle: Norm
    following: nn.Module


class Handed:
    """The sum that a layer handed to a norm, with its normed numbers."""

    def __init__(self) -> None:
        self._sum: mx.array | None = None
        self._normed: mx.array | None = None

    def put(self, total: mx.array, normed: mx.array) -> None:
        """Keep a sum and its norm."""
        self._sum, self._normed = total, normed

    def take(self, x: mx.array) -> mx.array | None:
        """Forget what was handed; return the normed numbers if x is the sum."""
        total, normed, self._sum, self._normed = self._sum, self._normed, None, None
        return normed if total is x else None


def install(model: nn.Module) -> None:
    """Let the model's layers of known kinds take the path if this device can run it and its results are right."""
    if "cuda" not in dialect.available():
        return
    layers = fusable(model)
    if not layers:
        return
    kernel = AddNorm(dialect.maker("cuda"))
    if problem := check.problem(kernel, layers[0][1].middle):
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
    for layer, parts in layers:
        own: Any = layer
        own._parts, own._add_norm = parts, kernel
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

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Return the layer's output for x [rows, length, dim]."""
        layer: Any = self
        attention, middle, following = self._parts
        total, normed = self._added(x, attention(layer.input_layernorm(x), mask, cache), middle)
        handed: Any = following
        total, normed = self._added(total, layer.mlp(normed), _norm(following))
        handed._handed.put(total, normed)
        return total

    def _added(self, a: mx.array, b: mx.array, norm: Norm) -> tuple[mx.array, mx.array]:
        """Return the sum of a and b and its norm. The kernel is for arrays of the weight's type."""
        if a.dtype == b.dtype == norm.weight.dtype and a.shape == b.shape:
            return self._add_norm(a, b, norm)
        total = a + b
        return total, mx.fast.rms_norm(total, norm.weight, norm.epsilon)


class HandedNorm:
    """Mixin of a norm whose input comes from a layer that has normed it already."""

    _handed: Handed

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of x: what was handed with x, or its own result."""
        normed = self._handed.take(x)
        return super().__call__(x) if normed is None else normed  # type: ignore[misc]
