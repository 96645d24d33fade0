"""A fused path on CUDA through the MLPs of a transformer: one product for gate and up, one kernel for SwiGLU.

An MLP's own code is kept and runs whenever the fused path cannot. The known kinds are those whose code was read:
`down_proj(swiglu(gate_proj(x), up_proj(x)))` and nothing else.

The kernel computes silu(gate) · up from one array with gates and ups side by side, a merged linear's output. mlx-lm's
function takes two arrays, so the product would have to be split first. As in MLX's kernels for CUDA, the
result of every operation is rounded to the arrays' type before the next operation reads it, and the exponential
function is the one that MLX calls there. So the results are meant to be those of MLX bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3, qwen3_moe, qwen3_next
from mlx_lm.models.activations import swiglu

from mlx_tandem.model import backend
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import Rejected, checked, relative_error
from mlx_tandem.model.kernels.dialect import Make, Source
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.ops.products.merged import MOST_TOKENS, joined_product, whole_of

log = logging.getLogger(__name__)

# --- The kernel ------------------------------------------------------------------------------------------------------

EACH = 8
"""Neighbouring numbers of a row that a thread computes: 16 bytes."""

TYPES = (mx.bfloat16, mx.float16)
"""Types of the arrays that the kernel is for."""

MOST_THREADS = 128
"""Most threads of a block."""

_FUNCTIONS = r"""
template <class T> struct alignas(8 * sizeof(T)) Eight {
  T of[8];
};
template <class T> DEVICE T swiglu(float gate, float up, T) {
  const T exp_abs = EXP(T(gate < 0.0f ? -gate : gate));
  const T sum = T(1.0f + float(exp_abs));
  const T part = T(1.0f / float(sum));  // the sigmoid of -|gate|
  const T sigmoid = gate < 0.0f ? part : T(1.0f - float(part));
  const T silu = T(gate * float(sigmoid));
  return T(float(silu) * up);
}
"""

_BODY = r"""
  const int column = 8 * (GROUP_X * THREADS + THREAD);
  if (column >= HIDDEN) return;
  const GLOBAL T* from = joined + (size_t)GROUP_Y * 2 * HIDDEN + column;
  const uint4 g = LOAD16(from), u = LOAD16(from + HIDDEN);
  const uint gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
  Eight<T> result;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const float2 gate = pair(gates[i], T()), up = pair(ups[i], T());
    result.of[2 * i] = swiglu(gate.x, up.x, T());
    result.of[2 * i + 1] = swiglu(gate.y, up.y, T());
  }
  *(GLOBAL Eight<T>*)(activated + (size_t)GROUP_Y * HIDDEN + column) = result;
"""


class SwiGLU:
    """The kernel that computes SwiGLU; `make` makes it."""

    def __init__(self, make: Make):
        self._kernel = make(Source("swiglu", ["joined"], ["activated"], _BODY, _FUNCTIONS))

    def __call__(self, joined: mx.array) -> mx.array:
        """Return silu(gate) · up [..., hidden] for joined [..., 2 · hidden], whose rows hold the gates, then the ups.

        The type is one of TYPES, and `hidden` is a multiple of EACH.
        """
        *lead, both = joined.shape
        hidden = both // 2
        threads = min(MOST_THREADS, -(-hidden // (32 * EACH)) * 32)
        (activated,) = self._kernel(
            [joined],
            {"T": joined.dtype, "HIDDEN": hidden},
            (-(-hidden // (EACH * threads)), joined.size // both, 1),
            threads,
            [((*lead, hidden), joined.dtype)],
        )
        return activated


# --- Its check -------------------------------------------------------------------------------------------------------

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


# --- Its use ---------------------------------------------------------------------------------------------------------

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
    if why := problem(kernel, sorted(sizes), dtype):
        log.warning("SwiGLU runs as MLX's own operations: %s", why)
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
