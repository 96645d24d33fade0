"""Model folders of a few kilobytes with random weights: one for each family of mlx-lm that a test wants."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

VOCAB = 300
KV_HEADS = 2

_SHAPES: dict[str, Any] = {
    # Every family takes what it knows of these names; the widths are small and no two that could be mistaken are equal.
    "attention_bias": False,
    "bos_token_id": 1,
    "decoder_sparse_step": 1,
    "eos_token_id": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 256,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "n_ctx": 256,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_eps": 1e-5,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": 4,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_traditional": False,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": VOCAB,
}

_MULTIPLIERS = {
    "attention_multiplier": 0.25,
    "embedding_multiplier": 1.5,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.7,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "bailing_moe": {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "cohere": {},
    "deepseek": {},
    "deepseek_v3": {},
    "dots1": {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "exaone": {"num_layers": 2},
    "gemma": {},
    "gemma2": {},
    "glm": {},
    "glm4": {},
    "glm4_moe_lite": {},
    "gpt2": {},
    "gpt_bigcode": {"n_inner": 96},
    "gpt_neox": {"rotary_emb_base": 10_000, "rotary_pct": 0.25, "use_parallel_residual": True},
    "granite": _MULTIPLIERS,
    "granitemoe": _MULTIPLIERS,
    "helium": {},
    "hunyuan_v1_dense": {},
    "internlm2": {},
    "internlm3": {},
    "laguna": {},
    "llama": {},
    "mimo": {},
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2},
    "mixtral": {},
    "nemotron": {},
    "olmo2": {},
    "olmoe": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {},
    "telechat3": {},
    "youtu_llm": {},
}
"""What each family needs beside the common shapes."""

MIXTURES = tuple(
    f for f in FAMILIES if "moe" in f or f in ("Klear", "deepseek", "deepseek_v3", "dots1", "glm4_moe_lite", "mixtral")
)
"""Families whose layers choose among experts."""

OTHER_CACHES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": {"sliding_window": 16},
    "mamba": {
        "conv_kernel": 4, "state_size": 8, "time_step_rank": 4, "use_bias": False, "use_conv_bias": True,
    },
    "plamo2": {},
}  # fmt: skip
"""Families that keep something else than keys and values of every position: a window of them, or a state."""


def module_of(family: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{family}")


def settings(family: str, **changes: Any) -> dict[str, Any]:
    """The contents of a config.json."""
    return {**_SHAPES, **(FAMILIES | OTHER_CACHES).get(family, {}), **changes, "model_type": family}


def make(folder: Path, family: str, *, bits: int | None = None, seed: int = 0, **changes: Any) -> Path:
    """Write a folder that mlx-lm loads. `bits`: quantise it in groups of 32. The same arguments, the same weights.

    The weights are wide enough that greedy text varies.
    """
    config = settings(family, **changes)
    module = module_of(family)
    model = module.Model(module.ModelArgs.from_dict(config))
    rng = np.random.default_rng(seed)
    weights = [(name, _draw(rng, name, p)) for name, p in tree_flatten(model.parameters())]
    model.load_weights(weights)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _draw(rng: np.random.Generator, name: str, p: mx.array) -> mx.array:
    if p.ndim == 1:
        # Norms near one and biases near nothing, none of them so even that a mistake in them would cancel.
        around = 0.0 if name.endswith("bias") else 1.0
        return mx.array((around + 0.1 * rng.standard_normal(p.shape)).astype(np.float32))
    return mx.array((rng.standard_normal(p.shape) * 1.5 * p.shape[-1] ** -0.5).astype(np.float32))
