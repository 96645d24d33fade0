"""The short way through attention blocks beside their own code on this device: whether it is right, and not slower."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mlx_tandem.model import probe
from mlx_tandem.model.attention import block
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.kvcache import LayerKernels, LayerShape
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.mixin import unmix

log = logging.getLogger(__name__)

ROWS = 16  # of the forward that is timed

MOST = 1.1
"""Times as long as with the blocks' own code a forward may take: most of that are products, whose time varies."""


def choose(
    model: LoadedModel,
    vocab_size: int,
    shapes: Sequence[LayerShape],
    kernels: Sequence[LayerKernels | None],
    block_size: int,
    axes: int,
    *,
    timed: bool,
) -> str:
    """Let the model's attention blocks take the short way where it is right and, if it is `timed`, not slower.

    Returns why they run their own code; empty: they do not, or none is of a known kind.
    """
    blocks = block.known(model.module)
    if not blocks:
        return ""
    if inplace.writing().store is None:
        # The pool may have one kind of writer only: MLX orders nothing behind a kernel's write to its input.
        return "their kernel writes the KV pool, which MLX's own operations do on this device"
    before = _milliseconds(model, shapes, kernels, block_size, axes) if timed else 0.0
    block.shorten(blocks)
    try:
        error = probe.fused_error(model, vocab_size, shapes, kernels, block_size, axes)
        problem = "" if error <= 1 else f"in few operations they are off by {error:.1e}"
        if timed and not problem:
            now = _milliseconds(model, shapes, kernels, block_size, axes)
            slower = f"in few operations a step of {ROWS} rows takes {now:.1f} ms, else {before:.1f}"
            problem = slower if now > MOST * before else ""
    except Exception as e:  # whatever a compiler or a driver says
        log.warning("attention blocks in few operations failed their check", exc_info=True)
        problem = f"{type(e).__name__}: {e}".strip()[:500]
    if problem:
        for module, _ in blocks:
            unmix(module)
    return problem


def _milliseconds(
    model: LoadedModel,
    shapes: Sequence[LayerShape],
    kernels: Sequence[LayerKernels | None],
    block_size: int,
    axes: int,
) -> float:
    return probe.decode_seconds(model, shapes, kernels, block_size, axes, ROWS) * 1e3
