"""The models that are measured: the user's own, or models of known shapes with random weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

from mlx_tandem.cli.bench.hybrid_shape import HybridShape
from mlx_tandem.cli.bench.shapes import SHAPES, Shape, write_model
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.config import ModelConfig

ON_GPU = Shape(1024, 28, 16, 8, 128, 3072, 151_936, dtype="bfloat16")
"""The shape of Qwen3-0.6B."""

HYBRID_ON_GPU = HybridShape(1024, 24, 8, 2, 256, 3584, 151_936, 16, 16, 128)
"""A shape like that of Qwen3.5-0.8B, with a smaller vocabulary."""

HYBRID_SMALL = HybridShape(64, 4, 4, 2, 32, 128, 512, 2, 4, 32, dtype="float32")

BITS = 4
"""Bits of the weights on a GPU, as most models on Macs have them."""


def dense(bench: Bench) -> ModelConfig:
    """Return the model that the user names, or one with attention in every layer."""
    if bench.sizes.model:
        return ModelConfig(bench.sizes.model)
    if _are_small(bench):
        return _made(bench, SHAPES["0.13m" if bench.sizes.small else "4m"])
    return _made(bench, ON_GPU)


def hybrid(bench: Bench) -> ModelConfig:
    """Return a model of which three of four layers keep a state."""
    return _made(bench, HYBRID_SMALL if _are_small(bench) else HYBRID_ON_GPU)


def _are_small(bench: Bench) -> bool:
    from mlx_tandem.model import backend

    return bench.sizes.small or backend.current().measuring.only_small_models


def _made(bench: Bench, shape: Shape | HybridShape) -> ModelConfig:
    """Return a model of this shape whose weights are drawn when it is loaded."""
    folder = bench.cleanup.enter_context(tempfile.TemporaryDirectory(prefix="tandem-doctor-"))
    bits = BITS if shape.dtype != "float32" else None
    positions = max(40_960, bench.sizes.prompt)
    model = write_model(Path(folder), shape, positions=positions, weights=False, bits=bits)
    return ModelConfig(str(model), random_weights=True)
