"""Check of the fused path through attention blocks: it must give the model's own logits and not be slower."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import mlx.nn as nn

from mlx_tandem.model import probe
from mlx_tandem.model.attention import fused_block
from mlx_tandem.model.cache.kvcache import LayerKernels
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.modules import unmix
from mlx_tandem.model.ops import inplace
from mlx_tandem.model.ops.checking import Rejected, checked

ROWS = 16
"""Rows of the forward that is timed."""

MOST = 1.1
"""Longest time of a forward on the fused path, as a multiple of the time by the blocks' own code.

Most of that time is spent in matrix products, whose duration varies by a few per cent.
"""


def use(model: LoadedModel) -> None:
    """Switch the model's attention blocks to the fused path, which another process has checked."""
    fused_block.use_fused_path(fused_block.fusable_blocks(model.module))


def choose(
    model: LoadedModel,
    found: probe.Examined,
    kernels: Sequence[LayerKernels | None],
    block_size: int,
    *,
    timed: bool,
    adapters: bool,
) -> str:
    """Switch the model's attention blocks to the fused path where it is right and, if `timed`, not slower.

    A block computes q, k and v apart if an adapter changes only some of its linears or is not computed by the fused
    kernels, and for many tokens if its linears are quantised. If either can happen, that path is checked too.

    Return why the blocks run their own code; empty if they are on the fused path or no block is of a known kind.
    """
    blocks = fused_block.fusable_blocks(model.module)
    shapes, axes = found.layers, found.mask_axes
    if not blocks:
        return ""
    if inplace.writing().store is None:
        # The pool may have one kind of writer only: MLX orders nothing behind a kernel's write to its input.
        return "their kernel writes the KV pool, which MLX's own operations do on this device"

    def milliseconds() -> float:
        return probe.decode_seconds(model, shapes, kernels, block_size, axes, ROWS, found.states) * 1e3

    before = milliseconds() if timed else 0.0
    fused_block.use_fused_path(blocks)

    def check() -> str:
        apart = adapters or not all(isinstance(block["q_proj"], nn.Linear) for block, _ in blocks)
        for path in (nullcontext(), fused_block.products_apart(blocks)) if apart else (nullcontext(),):
            with path:
                error = probe.fused_error(model, found.vocab_size, shapes, kernels, block_size, axes, found.states)
            if not error <= 1:
                raise Rejected(f"on the fused path their logits are off by {error:.1e}")
        if timed and (now := milliseconds()) > MOST * before:
            raise Rejected(f"a step of {ROWS} rows takes {now:.1f} ms on the fused path, and {before:.1f} without it")
        return ""

    def own_code(reason: str) -> str:
        for module, _ in blocks:
            unmix(module)
        return reason

    return checked("the fused path through attention blocks", check, own_code)
