"""Sizes, LoRA layers and file formats of the demo model. Imports MLX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_unflatten
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.tuner.lora import LoRALinear

from .text import END_TEXT, IM_END

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LINEARS = (*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP))
"""Every linear layer of a block, which an adapter changes."""


@dataclass(frozen=True)
class Size:
    """Width and depth; heads have 64 channels."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int


SIZES = {
    "base": Size(256, 6, 576, 4, 2),
    "draft": Size(128, 2, 192, 2, 2),
    "tiny": Size(64, 2, 64, 2, 2),
}


@dataclass(frozen=True)
class Adapter:
    """The recipe of one adapter: ``y += scale * (x A) B``; ``mix`` changes the weights of the skills."""

    name: str
    rank: int
    scale: float
    format: str
    dtype: str
    steps: int
    mix: tuple[tuple[str, float], ...] = ()


ADAPTERS = (
    Adapter("shout", 16, 4.0, "mlx-lm", "float32", 1500, (("down", 0.0), ("repeat", 2.0), ("story", 1.0))),
    Adapter("json", 8, 2.0, "peft", "bfloat16", 600, (("down", 0.0), ("json", 2.0))),
    Adapter("down", 4, 4.0, "peft", "float32", 500, (("down", 20.0),)),
)


def config(size: Size, vocabulary: int) -> dict[str, Any]:
    """Return ``config.json`` of a Qwen3 model of this size."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "intermediate_size": size.inner,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_TEXT,
        "torch_dtype": "bfloat16",
    }


def build(size: Size, vocabulary: int) -> Model:
    """Return a model with fresh float32 weights from MLX's random state."""
    model = Model(ModelArgs.from_dict(config(size, vocabulary)))
    mx.eval(model.parameters())
    return model


def parameter_count(tree: Any) -> int:
    """Return the number of parameters in a tree."""
    return sum(array.size for _, array in tree_flatten(tree))


def save_model(model: Model, size: Size, vocabulary: int, folder: Path) -> None:
    """Write config.json, generation_config.json and the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(size, vocabulary), indent=2) + "\n")
    generation = {"eos_token_id": [IM_END, END_TEXT], "pad_token_id": END_TEXT}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    weights = {name: array.astype(mx.bfloat16) for name, array in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})


def load_model(folder: Path, dtype: mx.Dtype = mx.float32) -> Model:
    """Return the model of a folder written by ``save_model``, its bfloat16 weights cast to ``dtype``."""
    args = json.loads((folder / "config.json").read_text())
    model = Model(ModelArgs.from_dict(args))
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    model.load_weights([(name, array.astype(dtype)) for name, array in weights.items()])
    mx.eval(model.parameters())
    return model


def add_lora(model: Model, rank: int, scale: float) -> None:
    """Freeze ``model`` and wrap every linear layer of every block; the new arrays are its trainable parameters."""
    model.freeze()
    for layer in model.layers:
        wrapped = [
            (name, LoRALinear.from_base(module, r=rank, scale=scale, dropout=0.0))
            for name, module in layer.named_modules()
            if name in LINEARS and isinstance(module, nn.Linear)
        ]
        layer.update_modules(tree_unflatten(wrapped))
    mx.eval(model.parameters())


def save_adapter(arrays: dict[str, mx.array], adapter: Adapter, layers: int, folder: Path) -> None:
    """Write an adapter folder in the adapter's format; ``arrays`` are named ``model.layers.N.<linear>.lora_a`` /
    ``lora_b``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(mx, adapter.dtype)
    if adapter.format == "mlx-lm":
        weights = {name: array.astype(dtype) for name, array in arrays.items()}
        mx.save_safetensors(str(folder / "adapters.safetensors"), weights, metadata={"format": "mlx"})
        settings: dict[str, Any] = {
            "fine_tune_type": "lora",
            "num_layers": layers,
            "lora_parameters": {
                "rank": adapter.rank,
                "scale": adapter.scale,
                "dropout": 0.0,
                "keys": list(LINEARS),
            },
        }
    else:
        weights = {}
        for name, array in arrays.items():
            path, half = name.rsplit(".", 1)
            turned = mx.contiguous(array.T.astype(dtype))
            weights[f"base_model.model.{path}.lora_{half[-1].upper()}.weight"] = turned
        mx.save_safetensors(str(folder / "adapter_model.safetensors"), weights, metadata={"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "mlx-tandem demo",
            "r": adapter.rank,
            "lora_alpha": int(adapter.rank * adapter.scale),
            "lora_dropout": 0.0,
            "target_modules": [*ATTENTION, *MLP],
            "bias": "none",
            "fan_in_fan_out": False,
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "rank_pattern": {},
            "alpha_pattern": {},
            "layers_to_transform": None,
            "init_lora_weights": True,
            "inference_mode": True,
        }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def load_adapter(model: Model, folder: Path) -> None:
    """Wrap ``model`` with the adapter of a folder, in either format, in the model's own type."""
    settings = json.loads((folder / "adapter_config.json").read_text())
    dtype = model.model.norm.weight.dtype
    arrays: dict[str, mx.array] = {}
    if "peft_type" in settings:
        rank, scale = settings["r"], settings["lora_alpha"] / settings["r"]
        loaded = mx.load(str(folder / "adapter_model.safetensors"))
        assert isinstance(loaded, dict)
        for name, array in loaded.items():
            path, half, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
            arrays[f"{path}.{half.lower()}"] = array.T
    else:
        rank, scale = settings["lora_parameters"]["rank"], settings["lora_parameters"]["scale"]
        loaded = mx.load(str(folder / "adapters.safetensors"))
        assert isinstance(loaded, dict)
        arrays = loaded
    add_lora(model, rank, scale)
    expected = {name for name, _ in tree_flatten(model.trainable_parameters())}
    if set(arrays) != expected:
        raise ValueError(f"{folder}: adapter arrays do not match the model")
    model.load_weights([(name, array.astype(dtype)) for name, array in arrays.items()], strict=False)
    mx.eval(model.parameters())


def cast(tree: Any, dtype: mx.Dtype) -> Any:
    """Return the tree with its arrays cast to ``dtype``."""
    return tree_map(lambda array: array.astype(dtype), tree)
