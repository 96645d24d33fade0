"""A fused path on CUDA through the MLPs of a transformer: one product for gate and up, one kernel for SwiGLU.

An MLP's own code is kept and runs whenever the fused path cannot. The known kinds are those whose code was read:
`down_proj(swiglu(gate_proj(x), up_proj(x)))` and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_moe, qwen3_next

from mlx_tandem.model import backend
from mlx_tandem.model.kernel_checks import mlp as check
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.swiglu import EACH, TYPES, SwiGLU
from mlx_tandem.model.linears.merged import MOST_TOKENS, joined_product, whole_of
from mlx_tandem.model.mixin import mix_in

log = logging.getLogger(__name__)

KINDS = (llama.MLP, qwen2.MLP, qwen3.MLP, qwen3_moe.MLP, qwen3_next.Qwen3NextMLP)
"""The MLP classes of mlx-lm that the fused path may replace; qwen3_5 has that of qwen3_next."""


def install(model: nn.Module, dtype: mx.Dtype) -> None:
    """Let the model's MLPs of known kinds take the path if this device can run it and its results are right.

    dtype: the type of the numbers between the model's modules.
    """
    here = backend.current().kernels
    if here.target is None or not here.joins_operations or dtype not in TYPES:
        return
    mlps = fusable(model)
    if not mlps:
        return
    kernel = SwiGLU(dialect.maker(here.target))
    sizes = {mlp["gate_proj"]["weight"].shape[0] for mlp in mlps}
    if problem := check.problem(kernel, sorted(sizes), dtype):
        log.warning("SwiGLU runs as MLX's own operations: %s", problem)
    else:
        use(mlps, kernel)
        log.info("each of %d MLPs computes SwiGLU by one kernel", len(mlps))


def fusable(model: nn.Module) -> list[nn.Module]:
    """Return the model's MLPs that can take the path."""
    return [module for module in model.modules() if type(module) in KINDS and _fits(module)]


def use(mlps: Iterable[nn.Module], kernel: SwiGLU) -> None:
    """Let these MLPs take the path from here on."""
    for mlp in mlps:
        own: Any = mlp
        own._swiglu = kernel
        mix_in(mlp, FusedMLP)


def _fits(mlp: Any) -> bool:
    """Return whether gate_proj and up_proj are merged and have equal widths that are multiples of EACH."""
    gates, ups = (linear["weight"].shape[0] for linear in (mlp.gate_proj, mlp.up_proj))
    return gates == ups and gates % EACH == 0 and whole_of((mlp.gate_proj, mlp.up_proj)) is not None


class FusedMLP:
    """Mixin of an MLP that takes the fused path for up to MOST_TOKENS tokens of a 16-bit type, unless its linears are
    faster one by one.
    """

    _swiglu: SwiGLU

    def __call__(self, x: mx.array) -> mx.array:
        """Return the MLP's output for x [..., dim]."""
        mlp: Any = self
        product = self._product(x)
        if product is None:
            output: mx.array = super().__call__(x)  # type: ignore[misc]
        else:
            output = mlp.down_proj(self._swiglu(product))
        return output

    def _product(self, x: mx.array) -> mx.array | None:
        """Return the gates and ups for x side by side; None if the MLP's own code has to run."""
        mlp: Any = self
        if x.dtype not in TYPES or x.size // x.shape[-1] > MOST_TOKENS:
            return None
        product = joined_product((mlp.gate_proj, mlp.up_proj), x)
        return product if product is not None and product.dtype in TYPES else None
