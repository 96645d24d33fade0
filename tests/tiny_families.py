"""The settings with which each family of mlx-lm makes a model of a few kilobytes."""

from __future__ import annotations

import importlib
from typing import Any

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

_SIGMOID_EXPERTS = {"first_k_dense_replace": 1, "n_group": 1, "routed_scaling_factor": 1.0, "topk_group": 1}

_LATENT_EXPERTS = {**_LATENT, **_SIGMOID_EXPERTS, "moe_layer_freq": 1}

_LONGCAT = {
    **_LATENT, "attention_method": "MLA", "expert_ffn_hidden_size": 32, "ffn_hidden_size": 96,
    "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "moe_topk": 2, "num_layers": 2, "routed_scaling_factor": 1.0,
    "zero_expert_num": 2, "zero_expert_type": "identity",
}  # fmt: skip

_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 4.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
    "type": "yarn",
}  # fmt: skip

_SCALED_BY_POSITION = {
    **_YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "rope_theta": 10_000.0, "rope_type": "yarn",
}  # fmt: skip

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
    "apertus": {"post_norm": False, "qk_norm": True},
    "deepseek_v2": {**_LATENT_EXPERTS, "rope_scaling": {**_YARN, "mscale": 1.0}, "topk_method": "greedy"},
    "glm4_moe": {**_SIGMOID_EXPERTS, "rope_scaling": None, "use_qk_norm": True},
    "gptj": {"rotary_dim": 8},
    "hunyuan": {
        "cla_share_factor": 2, "moe_topk": 2, "num_shared_expert": 1, "rope_scaling": {
            "alpha": 10.0, "factor": 1.0, "type": "dynamic",
        }, "use_cla": True, "use_mixed_mlp_moe": True, "use_qk_norm": True,
    },
    "lille-130m": {"block_size": 256, "n_kv_heads": KV_HEADS},
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0], "use_qk_norm": True},
    "longcat_flash": _LONGCAT,
    "minicpm3": {**_LATENT, "dim_model_base": 32, "rope_scaling": {
        "long_factor": [1.5] * 4, "original_max_position_embeddings": 16, "short_factor": [1.0] * 4, "type": "longrope",
    }, "scale_depth": 1.4, "scale_emb": 2},
    "minimax": {"rotary_dim": 8, "shared_intermediate_size": 32},
    "mistral4": {**_LATENT_EXPERTS, "rope_parameters": _SCALED_BY_POSITION},
    "muse_glimmer": {},
    "nanbeige": {},
    "nanochat": {},
    "nemotron-nas": {"block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"n_heads_in_group": 2}, "ffn": {"replace_with_linear": True}},
    ], "num_hidden_layers": 3},
    "openelm": {
        "ffn_dim_divisor": 8, "ffn_multipliers": [1.0, 2.0], "model_dim": 64, "num_kv_heads": [KV_HEADS] * 2,
        "num_query_heads": [4, 4], "num_transformer_layers": 2,
    },
    "phixtral": {"model_dim": 64, "num_heads": 4, "num_layers": 2, "num_vocab": VOCAB, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo3": {},
    "qwen": {"intermediate_size": 192, "kv_channels": 16},
    "solar_open": _SIGMOID_EXPERTS,
    "talkie": {},
}  # fmt: skip
"""What each family needs beside the common shapes."""

WINDOW: dict[str, Any] = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

_SHARED = {
    "hidden_size_per_layer_input": 8, "layer_types": WINDOW["layer_types"] * 2, "num_hidden_layers": 4,
    "num_kv_shared_layers": 2, "sliding_window": 16, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
"""The last layers read the keys and values of earlier ones."""

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
    "afmoe": {**WINDOW, "mup_enabled": False, "num_dense_layers": 1},
    "exaone_moe": {**WINDOW, "is_moe_layer": [False, True], "num_shared_experts": 1},
    "gemma3n": {"text_config": {
        **_SHAPES, **_SHARED, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "altup_active_idx": 0,
        "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 2, "final_logit_softcapping": 30.0,
        "laurel_rank": 8, "model_type": "gemma3n_text", "rope_local_base_freq": 10_000.0,
        "vocab_size_per_layer_input": VOCAB - 20,
    }},
    "gemma4_text": {**_SHARED, "global_head_dim": 32},
    "iquestloopcoder": {"loop_window_size": 16},
    "mellum": {**WINDOW, "rope_parameters": {
        kind: {"rope_theta": 10_000.0, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
    }},
    "mimo_v2_flash": {
        **_SIGMOID_EXPERTS, "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True,
        "hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "scoring_func": "sigmoid", "sliding_window_size": 16,
        "swa_head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": KV_HEADS,
        "swa_rope_theta": 10_000.0, "swa_v_head_dim": 12, "topk_method": "noaux_tc", "v_head_dim": 12,
    },
    "ministral3": {**WINDOW, "rope_parameters": _SCALED_BY_POSITION},
    "step3p5": {
        **WINDOW, "moe_num_experts": 4, "moe_top_k": 2, "num_attention_groups": KV_HEADS, "share_expert_dim": 32,
    },
}  # fmt: skip
"""Families with layers that see a window of positions; of `spark2_5`, all do."""

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
    "kimi_k3": {
        **_LATENT, "activation_situ_beta": 2.0, "attn_res_block_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "situ", "linear_attn_config": {
            "full_attn_layers": [2], "head_dim": 16, "kda_layers": [1], "num_heads": 4, "short_conv_kernel_size": 4,
        }, "mla_use_output_gate": True, "num_experts_per_token": 4, "num_shared_experts": 1,
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

WRAPPED = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Families whose text model is that of another family, which their `text_config` describes."""

_EXPERTS = (
    "Klear", "afmoe", "deepseek", "dots1", "gpt_oss", "kimi", "longcat", "mellum", "mimo_v2", "minimax", "mistral4",
    "mixtral", "phixtral", "solar", "step3p5",
)  # fmt: skip

MIXTURES = tuple(
    f for f in (*FAMILIES, *WINDOWED, *WRAPPED) if "moe" in f or any(f.startswith(name) for name in _EXPERTS)
)
"""Families whose layers choose among experts."""

EVERY_EXPERT = {"moe_k": 4, "moe_top_k": 4, "moe_topk": 6, "num_experts_per_tok": 4}
"""Changes with which the layers of such a family use all of their experts."""

UNTRAINED = ("gemma3n", "gemma4", "gemma4_text", "hunyuan", "iquestloopcoder", "kimi_k3", "rwkv7", "talkie")
"""Families that are served, but cannot be trained on: their layers take or hand on more than one array of states."""

SERVED = (*FAMILIES, *WINDOWED, *RECURRENT, *WRAPPED)
"""Families whose answers the tests compare with mlx-lm's."""

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

_INDEXED = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 12}

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "afm7": {"hidden_dim": 64, "num_heads": 4, "num_kv_heads": KV_HEADS, "num_kv_reuse_layers": 1, "num_layers": 3},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": KV_HEADS, "rope_theta": 10_000.0}, "d_model": 64,
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}, "n_heads": 4, "n_layers": 2,
    },
    "deepseek_v32": {**_LATENT_EXPERTS, **_INDEXED},
    "deepseek_v41": {
        "compress_ratios": [0, 0], "o_groups": 2, "o_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
        "sliding_window": 8,
    },
    "glm_moe_dsa": {
        **_LATENT_EXPERTS, **_INDEXED, "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    },
    "gpt_bigcode": {"n_inner": 96},
    "llama4": {"text_config": {
        **_SHAPES, "attention_chunk_size": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96,
        "model_type": "llama4_text", "num_experts_per_tok": 1, "num_hidden_layers": 4, "rope_scaling": None,
        "use_qk_norm": True,
    }},
    "longcat_flash_ngram": {**_LONGCAT, "emb_split_num": 2, "ngram_vocab_size_ratio": 2},
    "minimax_m3_vl": {"text_config": {
        **_SHAPES, "dense_intermediate_size": 96, "moe_layer_freq": [0, 1], "shared_intermediate_size": 32,
        "sparse_attention_config": {
            "sparse_attention_freq": [0, 1], "sparse_block_size": 8, "sparse_index_dim": 16, "sparse_local_block": 1,
            "sparse_num_index_heads": 2, "sparse_topk_blocks": 2,
        },
    }},
    "phi3small": {"dense_attention_every_n_layers": 2, "ff_intermediate_size": 96, "gegelu_limit": 20.0},
}  # fmt: skip
"""Families that are refused."""

_KNOWN = FAMILIES | WINDOWED | RECURRENT | UNSUPPORTED


def module_of(family: str) -> Any:
    return importlib.import_module(f"mlx_lm.models.{family}")


def settings(family: str, **changes: Any) -> dict[str, Any]:
    """The contents of a config.json. The changes of a family with a text model of its own go into its `text_config`."""
    if family in WRAPPED:
        # Its own code keeps the head of a text model that has one.
        text = settings(WRAPPED[family], **{"tie_word_embeddings": False, **changes})
        return {"text_config": text, "vocab_size": VOCAB, "model_type": family}
    known = _KNOWN.get(family, {})
    if "text_config" in known:
        return {"text_config": {**known["text_config"], **changes}, "model_type": family}
    return {**_SHAPES, **known, **changes, "model_type": family}
