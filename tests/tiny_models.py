"""Model folders of a few kilobytes with random weights: one for each family of mlx-lm that a test wants."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_tandem.adapters.formats import LinearShape
from tests import tiny_families
from tests.tiny_families import module_of, settings

VOCAB = tiny_families.VOCAB


def make(folder: Path, family: str, *, bits: int | None = None, seed: int = 0, **changes: Any) -> Path:
    """Write a folder that mlx-lm loads. `bits`: quantise it in groups of 32. The same arguments, the same weights.

    The weights are wide enough that greedy text varies.
    """
    config = settings(family, **changes)
    module = module_of(family)
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    parameters: Any = tree_flatten(model.parameters())
    weights = [(name, _draw(rng, name, p)) for name, p in parameters]
    model.load_weights(weights)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _draw(rng: np.random.Generator, name: str, p: mx.array) -> mx.array:
    if p.ndim < 2:
        # Norms near one and biases near nothing, none of them so even that a mistake in them would cancel.
        around = 0.0 if name.endswith("bias") else 1.0
        return mx.array((around + 0.1 * np.asarray(rng.standard_normal(p.shape))).astype(np.float32))
    return mx.array((rng.standard_normal(p.shape) * 1.5 * p.shape[-1] ** -0.5).astype(np.float32))


Deltas = dict[str, np.ndarray[Any, Any]]
"""What an adapter adds to each module's weight: [inputs, outputs], or with a leading expert axis."""


def make_adapter(
    folder: Path,
    linears: Mapping[str, LinearShape],
    kind: Literal["mlx-lm", "peft"],
    *,
    rank: int,
    seed: int,
    keep: Callable[[str], bool] = lambda path: True,
) -> Deltas:
    """Write an adapter folder for the modules of `linears` that `keep` names; strong enough to change greedy text."""
    rng = np.random.default_rng(seed)
    scale = 2.0
    tensors: dict[str, mx.array] = {}
    deltas: Deltas = {}
    for path, shape in linears.items():
        if path.endswith("lm_head") or not keep(
            path
        ):  # tied models have no such module; see engine/test_output_head.py
            continue
        experts = (shape.experts,) if shape.experts else ()
        a = (rng.standard_normal((*experts, shape.inputs, rank)) * shape.inputs**-0.5).astype(np.float32)
        b = (rng.standard_normal((*experts, rank, shape.outputs)) * 0.4 * rank**-0.5).astype(np.float32)
        deltas[path] = scale * (a.astype(np.float64) @ b)
        turned_a, turned_b = np.ascontiguousarray(a.swapaxes(-1, -2)), np.ascontiguousarray(b.swapaxes(-1, -2))
        if kind == "peft":
            for name, at in peft_modules(path, shape).items():
                tensors[f"base_model.model.{name}.lora_A.weight"] = mx.array(turned_a[at])
                tensors[f"base_model.model.{name}.lora_B.weight"] = mx.array(turned_b[at])
        else:
            tensors[f"{path}.lora_a"] = mx.array(turned_a if experts else a)
            tensors[f"{path}.lora_b"] = mx.array(turned_b if experts else b)
    folder.mkdir(parents=True)
    if kind == "peft":
        config: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank}
        mx.save_safetensors(str(folder / "adapter_model.safetensors"), tensors)
    else:
        config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0}}
        mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return deltas


def peft_modules(path: str, shape: LinearShape) -> dict[str, Any]:
    """The names of PEFT's modules for a linear, and which part of its arrays each of them is: experts are apart."""
    block, _, leaf = path.rpartition(".")
    if not shape.experts:
        return {path: ...}
    return {f"{block.rpartition('.')[0]}.experts.{expert}.{leaf}": expert for expert in range(shape.experts)}


def merge(model: nn.Module, deltas: Deltas) -> nn.Module:
    """Add an adapter to a model's own weights; a quantised linear becomes a dense one."""
    modules = dict(model.named_modules())
    replaced: list[tuple[str, nn.Module]] = []
    for path, delta in deltas.items():
        module: Any = modules[path]
        change = mx.array(delta.swapaxes(-1, -2).astype(np.float32))
        if isinstance(module, nn.QuantizedLinear):
            weight = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            dense: Any = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in module)
            dense.weight = weight + change
            if "bias" in module:
                dense.bias = module.bias
            replaced.append((path, dense))
        else:
            module.weight = module.weight + change
    if replaced:
        model.update_modules(tree_unflatten(replaced))
    mx.eval(model.parameters())
    return model
