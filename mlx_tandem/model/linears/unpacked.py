"""Quantised weights that are unpacked to float32 for a CPU.

On a CPU, MLX multiplies packed weights by loops of its own, which are many times slower than OpenBLAS's products of
float32. The packed form takes about a quarter (8 bits) to an eighth (4 bits) of the memory.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import dequantize_model

from mlx_tandem.config import ModelConfig
from mlx_tandem.model import backend
from mlx_tandem.model.loader import LoadedModel, weights

log = logging.getLogger(__name__)

MOST_SHARE = 0.5
"""Largest share of the memory limit that unpacked weights may take."""


def unpack_for_cpu(model: LoadedModel, config: ModelConfig, limit: int) -> LoadedModel:
    """Return the model with its packed weights unpacked to the type that it computes in, if the device is a CPU.

    Weights stay packed if the settings say so, or if they would take more than MOST_SHARE of `limit` bytes. Nothing is
    evaluated: call it before the weights are read.
    """
    if not backend.current().products.only_float32_is_fast or not config.unpack_weights or model.quantization is None:
        return model
    packed = sum(p.nbytes for p in weights(model.module))
    size = model.parameters * model.dtype.size
    if size > MOST_SHARE * limit:
        log.warning(
            "its %s weights stay packed, which is slow on a CPU: as %s they would take %.1f GB of %.1f",
            model.quantization,
            _name(model.dtype),
            size / 1e9,
            limit / 1e9,
        )
        return model
    log.info(
        "its %s weights are unpacked to %s, which this CPU multiplies faster: %.1f GB instead of %.1f",
        model.quantization,
        _name(model.dtype),
        size / 1e9,
        packed / 1e9,
    )
    for module in (model.module, model.mtp):
        if module is not None:
            _unpack(module, model.dtype)
    return dataclasses.replace(model, quantization=f"{model.quantization}, unpacked")


def _unpack(module: nn.Module, dtype: mx.Dtype) -> None:
    """Replace all modules that have packed weights by ones that have weights of this type."""
    packed = [path for path, each in module.named_modules() if "scales" in each]
    dequantize_model(module)
    plain = dict(module.named_modules())
    for path in packed:
        each: Any = plain[path]
        if "scales" not in each:
            each.weight = each.weight.astype(dtype)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
