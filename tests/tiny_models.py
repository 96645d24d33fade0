"""Model folders of a few kilobytes with random weights: one for each family of mlx-lm that a test wants."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_tandem.adapters.formats import LinearShape

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

_LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}

FAMILIES: dict[str, dict[str, Any]] = {
    "Klear": {},
    "bailing_moe": {"num_shared_experts": 1, "first_k_dense_replace": 1},
    "cohere": {},
    "deepseek": {},
    "deepseek_v3": _LATENT,
    "dots1": {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4},
    "exaone": {"num_layers": 2},
    "gemma": {},
    "gemma2": {},
    "glm": {},
    "glm4": {},
    "glm4_moe_lite": _LATENT,
    "gpt2": {},
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
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2, "tie_word_embeddings": False},
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
    "youtu_llm": _LATENT,
}
"""What each family needs beside the common shapes."""

MIXTURES = tuple(
    f for f in FAMILIES if "moe" in f or f in ("Klear", "deepseek", "deepseek_v3", "dots1", "glm4_moe_lite", "mixtral")
)
"""Families whose layers choose among experts."""

WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

WINDOWED: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 16, "sliding_window_pattern": 2},
    "exaone4": {"sliding_window": 16, "sliding_window_pattern": "LG", "rope_scaling": None},
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 2},
    "gpt_oss": WINDOW,
    "olmo3": WINDOW,
    "spark2_5": {
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {"sliding_attention": {"rope_theta": 10_000.0}},
        "hidden_act": "gelu",
    },
}
"""Families with layers that see a window of positions; of the last one, all do."""

_DELTA_NET = {
    "full_attention_interval": 2,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
}

_CONVOLUTION = {"conv_L_cache": 3, "conv_bias": False, "full_attn_idxs": [1]}

_BAILING = {
    "first_k_dense_replace": 1,
    "group_norm_size": 2,
    "layer_group_size": 2,
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 32,
    "n_group": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "baichuan_m1": {"conv_window": 2, "tie_word_embeddings": False, "sliding_window": 16, "sliding_window_layers": [0]},
    "bailing_hybrid": {**_BAILING, **_LATENT},
    "bailing_moe_linear": _BAILING,
    "bailing_moe_v3": {**_BAILING, **_LATENT, "short_conv_kernel_size": 4, "head_dim": 16},
    "falcon_h1": {
        "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_n_heads": 4,
    },
    "gear": {"layer_types": ["conv_mixer", "sliding_attention", "full_attention"], "num_hidden_layers": 3,
             "sliding_window": 16},
    "granitemoehybrid": {
        **_MULTIPLIERS, "layer_types": ["mamba", "attention"], "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_n_heads": 4, "mamba_proj_bias": False,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
        "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_dt_rank": 4, "mamba_expand": 2,
    },
    "kimi_linear": {
        **_LATENT, "linear_attn_config": {
            "full_attn_layers": [2], "head_dim": 16, "kda_layers": [1], "num_heads": 4, "short_conv_kernel_size": 4,
        }, "model_max_length": 256, "num_experts_per_token": 2,
    },
    "lfm2": {
        **_CONVOLUTION, "block_auto_adjust_ff_dim": False, "block_dim": 64, "block_ff_dim": 96,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 8,
    },
    "lfm2_moe": {**_CONVOLUTION, "num_dense_layers": 1, "use_expert_bias": True},
    "mamba": {"conv_kernel": 4, "state_size": 8, "time_step_rank": 4, "use_conv_bias": True},
    "mamba2": {
        "conv_kernel": 4, "n_groups": 1, "num_heads": 4, "state_size": 8, "time_step_limit": [0.0, 100.0],
        "time_step_rank": 4, "use_conv_bias": True,
    },
    "nemotron_h": {
        "conv_kernel": 4, "hybrid_override_pattern": ["M", "*", "-"], "mamba_head_dim": 16, "mamba_num_heads": 4,
        "mamba_proj_bias": False, "n_groups": 2, "ssm_state_size": 8, "use_conv_bias": True,
    },
    "olmo_hybrid": {**_DELTA_NET, "layer_types": ["linear_attention", "full_attention"]},
    "plamo2": {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_num_heads": 4, "mamba_step": 2},
    "qwen3_5": {**_DELTA_NET, "num_experts": 0},
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_next": _DELTA_NET,
    "recurrent_gemma": {
        "attention_window_size": 16, "block_types": ["recurrent", "attention"], "conv1d_width": 4,
        "logits_soft_cap": 30.0,
    },
    "rwkv7": {"a_low_rank_dim": 8, "decay_low_rank_dim": 8, "gate_low_rank_dim": 8, "v_low_rank_dim": 8},
}  # fmt: skip
"""Families with layers that keep a state, most of them beside layers with attention."""

DISTINCT = {
    "llama": "plain attention",
    "qwen3_moe": "experts",
    "gemma2": "attention of its own, with capped scores",
    "deepseek_v3": "latent keys",
    "glm4_moe_lite": "latent keys, which decodes read in another way than prompts",
    "gpt2": "positions that are added",
    "gpt_neox": "positions that turn a part of each head",
    "cohere2": "positions in some layers only",
    "gemma3_text": "windows in some layers",
    "gpt_oss": "sinks",
    "spark2_5": "windows in all layers",
}
"""Families for which the runner does something that it does not do for others, and what that is; the others differ in
what mlx-lm's own modules compute between one call of the runner and the next."""

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "gpt_bigcode": {"n_inner": 96},
}
"""Families that take a single offset for all rows."""


def module_of(family: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{family}")


def settings(family: str, **changes: Any) -> dict[str, Any]:
    """The contents of a config.json."""
    return {
        **_SHAPES,
        **(FAMILIES | WINDOWED | RECURRENT | UNSUPPORTED).get(family, {}),
        **changes,
        "model_type": family,
    }


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
    if p.ndim == 1:
        # Norms near one and biases near nothing, none of them so even that a mistake in them would cancel.
        around = 0.0 if name.endswith("bias") else 1.0
        return mx.array((around + 0.1 * rng.standard_normal(p.shape)).astype(np.float32))
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
            tensors[f"base_model.model.{path}.lora_A.weight"] = mx.array(turned_a)
            tensors[f"base_model.model.{path}.lora_B.weight"] = mx.array(turned_b)
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
