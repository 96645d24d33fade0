"""The range of every number that comes from outside, written once; the server, the docs and the tests read this
table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import Meta

from mlx_tandem.errors import InvalidRequest, ModelError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of adapter names and aliases. A version is `name@number`."""

BASE = "base"
"""Name that always stands for the base model, whatever it is called and whatever adapter answers by default."""

BASE_NAMES = (BASE, "default_model")
"""Names of the base model on every server. Clients of mlx-lm's server send the second one."""

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Pattern of a client's X-Request-Id that is repeated in the reply and the log: printable ASCII without spaces."""


@dataclass(frozen=True)
class Range:
    """The values that a number may have, both bounds included."""

    low: float
    high: float
    integer: bool = False

    def __str__(self) -> str:
        """Return both bounds in words; bounds without a fraction appear as whole numbers with all their digits."""
        low, high = (str(int(b)) if b == int(b) else f"{b:g}" for b in (self.low, self.high))
        return f"between {low} and {high}"


PARAMETERS: dict[str, Range] = {
    "max_tokens": Range(1, 1_048_576, integer=True),
    "max_completion_tokens": Range(1, 1_048_576, integer=True),
    "max_output_tokens": Range(1, 1_048_576, integer=True),
    "temperature": Range(0.0, 2.0),
    "top_p": Range(0.0, 1.0),  # 0: the most likely token
    "top_k": Range(-1, 1_048_576, integer=True),  # -1 and 0: off
    "min_p": Range(0.0, 1.0),
    "repetition_penalty": Range(0.01, 10.0),
    "repetition_context_size": Range(0, 1_048_576, integer=True),  # 0: all tokens
    "presence_penalty": Range(-2.0, 2.0),
    "frequency_penalty": Range(-2.0, 2.0),
    "xtc_probability": Range(0.0, 1.0),
    "xtc_threshold": Range(0.0, 1.0),
    "seed": Range(-(2**63), 2**63 - 1, integer=True),
    "n": Range(1, 128, integer=True),  # the server's own limit is server.max_n
    "logprobs": Range(0, 20, integer=True),
    "top_logprobs": Range(0, 20, integer=True),
    "logit_bias": Range(-100.0, 100.0),
    "min_tokens": Range(0, 1_048_576, integer=True),
    "prompt_logprobs": Range(0, 20, integer=True),
    "thinking_token_budget": Range(0, 1_048_576, integer=True),
    "truncate_prompt_tokens": Range(-1, 1_048_576, integer=True),  # -1: to the length that fits; 0 is refused
    "dimensions": Range(1, 1_048_576, integer=True),
    "starting_after": Range(0, 2**53, integer=True),  # number of an event
    "limit": Range(1, 100, integer=True),  # entries of a page
    "expires_after_s": Range(3600, 2_592_000, integer=True),  # seconds after which a file is removed
    "ttl": Range(0.0, 31_536_000.0),
    "priority": Range(-1_000_000, 1_000_000, integer=True),
    "weight": Range(0.0, 1e6),  # weight of an alias's arm
    "false_promotion": Range(1e-9, 0.5),  # of an A/B test
    "false_take_back": Range(1e-9, 0.5),
    "min_answers": Range(1, 1_000_000, integer=True),
    "reward": Range(-1e6, 1e6),  # reward of a trajectory
    "feedback_score": Range(0.0, 1.0),  # of an answer; 1: good
    "choice": Range(0, 8191, integer=True),  # number of a choice of a completion
    "reward_weight": Range(-1e3, 1e3),  # weight of one part of a composite reward
    "reward_tokens": Range(1, 1_048_576, integer=True),
    "fps": Range(0.01, 1000.0),  # frames per second of a video
    "version": Range(0, 2**53, integer=True),  # version of an adapter; 0: the base
}

SETTINGS: dict[str, Range] = {  # by the path of the setting in config.py
    "engine.model.max_model_len": Range(0, 4_194_304, integer=True),
    "engine.cache.block_size": Range(1, 1024, integer=True),
    "engine.cache.num_blocks": Range(0, 2_147_483_647, integer=True),
    "engine.cache.memory_fraction": Range(0.01, 0.95),
    "engine.cache.kv_bits": Range(4, 16, integer=True),
    "engine.cache.kv_group_size": Range(8, 1024, integer=True),
    "engine.disk.ttl_days": Range(0.0, 36_500.0),
    "engine.disk.writer_queue_size": Range(1, 1_000_000, integer=True),
    "engine.disk.persistent_max_retries": Range(0, 1000, integer=True),
    "engine.disk.flush_interval_s": Range(0.01, 3600.0),
    "engine.disk.max_size_gb": Range(0.0, 1_000_000.0),
    "engine.scheduler.max_num_seqs": Range(1, 4096, integer=True),
    "engine.scheduler.max_chunk_tokens": Range(0, 1_048_576, integer=True),
    "engine.scheduler.prefill_share": Range(0.01, 100.0),
    "engine.scheduler.idle_prefill_ms": Range(0.0, 60_000.0),
    "engine.scheduler.prefill_batch_size": Range(0, 4096, integer=True),
    "engine.scheduler.max_inflight_tokens": Range(0, 2**40, integer=True),
    "engine.speculation.num_tokens": Range(1, 63, integer=True),
    "engine.speculation.disable_batch_size": Range(0, 4096, integer=True),
    "engine.speculation.ngram_min": Range(1, 64, integer=True),
    "engine.speculation.ngram_max": Range(1, 64, integer=True),
    "engine.lora.max_cpu_loras": Range(0, 1_000_000, integer=True),
    "engine.lora.max_cpu_lora_gb": Range(0.001, 65_536.0),
    "engine.parallel.ranks": Range(1, 64, integer=True),
    "engine.parallel.local_ranks": Range(0, 64, integer=True),
    "engine.lora.max_loras": Range(0, 4096, integer=True),
    "engine.lora.max_lora_rank": Range(1, 512, integer=True),
    "engine.heartbeat_seconds": Range(0.05, 60.0),
    "engine.memory_limit_gb": Range(0.0, 65_536.0),
    "engine.stall_seconds": Range(1.0, 3600.0),
    "server.port": Range(0, 65_535, integer=True),
    "server.seed": Range(0, 2**63 - 1, integer=True),
    "server.max_logprobs": Range(0, 20, integer=True),
    "server.default_max_tokens": Range(1, 1_048_576, integer=True),
    "server.max_request_bytes": Range(1024, 1 << 30, integer=True),
    "server.max_image_request_bytes": Range(1024, 1 << 30, integer=True),
    "server.max_n": PARAMETERS["n"],
    "server.max_registered_adapters": Range(0, 1_000_000, integer=True),
    "server.max_queue_size": Range(1, 1_000_000, integer=True),
    "server.max_prompt_tokens": Range(0, 4_194_304, integer=True),
    "server.max_generation_tokens": Range(0, 1_048_576, integer=True),
    "server.max_concurrent_requests": Range(0, 1_000_000, integer=True),
    "server.memory_pressure_threshold": Range(0.01, 1.0),
    "server.request_timeout_s": Range(0.0, 86_400.0),
    "server.first_token_timeout_s": Range(0.0, 86_400.0),
    "server.stream_keepalive_s": Range(0.0, 86_400.0),
    "server.receive_timeout_s": Range(0.1, 3600.0),
    "server.write_timeout_s": Range(0.1, 3600.0),
    "server.idle_unload_s": Range(0.0, 31_536_000.0),
    "server.drain_seconds": Range(0.0, 3600.0),
    "server.chat_template_timeout_s": Range(0.01, 3600.0),
}

LEARNING: dict[str, Range] = {  # settings of trainers and of fine-tuning from a file
    "rank": Range(1, 512, integer=True),
    "alpha": Range(1e-3, 1e6),
    "plus_ratio": Range(1e-3, 1e3),
    "dropout": Range(0.0, 0.95),
    "trainer_seed": Range(0, 2**63 - 1, integer=True),
    "learning_rate": Range(0.0, 10.0),
    "beta1": Range(0.0, 0.9999999),
    "beta2": Range(0.0, 0.9999999),
    "eps": Range(1e-30, 1.0),
    "weight_decay": Range(0.0, 10.0),
    "grad_norm": Range(0.0, 1e9),  # 0: not clipped
    "example_weight": Range(-1e6, 1e6),
    "example_logprob": Range(-1e4, 1e-3),  # rounding may bring a logprob over 0
    "example_temperature": Range(0.01, 2.0),
    "example_top_p": Range(1e-6, 1.0),
    "example_top_k": Range(0, 1_048_576, integer=True),
    "example_min_p": Range(0.0, 1.0),
    "scale": Range(0.0, 1e6),
    "clip_low": Range(0.0, 1.0),
    "clip_high": Range(0.0, 1e6),
    "kl_coef": Range(0.0, 1e3),
    "beta": Range(0.0, 1e3),
    "max_importance_ratio": Range(0.0, 1e6),
    "max_divergence": Range(0.0, 1e3),
    "epochs": Range(1, 100_000, integer=True),
    "batch_size": Range(1, 65_536, integer=True),
    "batch_tokens": Range(0, 2**30, integer=True),
    "accumulate": Range(1, 65_536, integer=True),
    "warmup_share": Range(0.0, 1.0),
    "rate_floor": Range(0.0, 1.0),
    "samples": Range(0, 64, integer=True),
    "save_every": Range(0, 2**31 - 1, integer=True),
    "patience": Range(0, 100_000, integer=True),
    "margin": Range(-1e3, 1e3),  # of a preference: difference of the scores
    "least_fall": Range(0.0, 1e6),
    "eval_every": Range(0, 2**31 - 1, integer=True),
    "valid_share": Range(0.0, 0.5),
    "max_length": Range(2, 4_194_304, integer=True),
}

SETTINGS |= {
    "engine.duty.inference": Range(0.0, 1e6),
    "engine.duty.training": Range(0.0, 1e6),
    "engine.duty.inter_token_p95_ms": Range(0.0, 60_000.0),
    "engine.duty.micro_batch_tokens": Range(0, 1_048_576, integer=True),
    "engine.duty.trainer_rank": Range(0, 512, integer=True),
    "engine.duty.trainers": Range(1, 64, integer=True),
    "rl_training.lora_rank": LEARNING["rank"],
    "rl_training.lora_alpha": LEARNING["alpha"],
    "rl_training.lora_plus_ratio": LEARNING["plus_ratio"],
    "rl_training.metrics_samples": LEARNING["samples"],
    "rl_training.seed": LEARNING["trainer_seed"],
    "rl_training.trajectory_buffer_size": Range(1, 1_000_000, integer=True),
    "rl_training.update_frequency": Range(1, 1_000_000, integer=True),
    "rl_training.scoring_batch_size": Range(1, 65_536, integer=True),
    "rl_training.gradient_accumulation_steps": LEARNING["accumulate"],
    "rl_training.max_staleness": Range(0, 1_000_000, integer=True),
    "rl_training.reward_workers": Range(1, 256, integer=True),
    "rl_training.reward_timeout_s": Range(0.01, 3600.0),
    "rl_training.reward_memory_mb": Range(64, 1_048_576, integer=True),
    "rl_training.siblings": Range(0, 1024, integer=True),
    "rl_training.group_size": Range(0, 1024, integer=True),
    "rl_training.open_trajectories": Range(1, 1_000_000, integer=True),
    "rl_training.open_trajectory_s": Range(1.0, 31_536_000.0),
    "rl_training.learning_rate": LEARNING["learning_rate"],
    "rl_training.target_kl": Range(1e-9, 1e9),
    "rl_training.warmup_steps": Range(0, 1_000_000, integer=True),
    "rl_training.decay_steps": Range(0, 1_000_000, integer=True),
    "rl_training.rate_floor": Range(0.0, 1.0),
    "rl_training.steps_per_update": Range(1, 64, integer=True),
    "rl_training.max_grad_norm": LEARNING["grad_norm"],
    "rl_training.weight_decay": LEARNING["weight_decay"],
    "rl_training.beta1": LEARNING["beta1"],
    "rl_training.beta2": LEARNING["beta2"],
    "rl_training.eps": LEARNING["eps"],
    "rl_training.least_spread": Range(1e-9, 1e9),
    "rl_training.loss_tokens": Range(1, 4_194_304, integer=True),
    "rl_training.clip_low": LEARNING["clip_low"],
    "rl_training.clip_high": LEARNING["clip_high"],
    "rl_training.kl_coef": LEARNING["kl_coef"],
    "rl_training.max_importance_ratio": LEARNING["max_importance_ratio"],
    "rl_training.max_divergence": LEARNING["max_divergence"],
    "rl_training.refuse_mismatch": Range(1e-9, 1e9),
    "rl_training.guard_kl": Range(1e-9, 1e9),
    "rl_training.guard_prompts": Range(0, 1024, integer=True),
    "rl_training.guard_false_rollback": Range(1e-9, 0.5),
    "rl_training.guard_false_accept": Range(1e-9, 0.5),
    "rl_training.validation_answers": Range(1, 1024, integer=True),
    "rl_training.guard_reward_drop": Range(0.0, 1e9),
    "tinker.trainers": Range(1, 64, integer=True),
    "tinker.rank": LEARNING["rank"],
    "tinker.lease_s": Range(1.0, 86_400.0),
    "cluster.wait_s": Range(1.0, 86_400.0),
    "cluster.trainers": Range(1, 64, integer=True),
    "cluster.round_updates": Range(1, 1_000_000, integer=True),
    "cluster.round_s": Range(1.0, 86_400.0),
    "batches.max_gb": Range(0.001, 65_536.0),
    "feedback.remember_s": Range(0.0, 31_536_000.0),
    "feedback.remember_mb": Range(0, 1_048_576, integer=True),
    "feedback.keep": Range(1, 10_000_000, integer=True),
    "feedback.batch_size": Range(1, 1024, integer=True),
    "feedback.wait_s": Range(0.0, 86_400.0),
    "feedback.epochs": Range(1, 1000, integer=True),
    "feedback.replay": Range(0.0, 100.0),
    "feedback.beta": Range(1e-6, 1e3),
    "feedback.learning_rate": LEARNING["learning_rate"],
    "checkpointing.interval": Range(1, 2**31 - 1, integer=True),
    "checkpointing.keep_n_checkpoints": Range(1, 100_000, integer=True),
}

_LAYERS = Range(1, 1024, integer=True)
_WIDTH = Range(1, 1 << 24, integer=True)
_HEADS = Range(1, 1 << 16, integer=True)
_EXPERTS = Range(0, 1 << 16, integer=True)
_POSITIONS = Range(1, 2**31 - 1, integer=True)
_EPSILON = Range(0.0, 1.0)

MODEL: dict[str, Range] = {  # settings in a model folder's config.json, under the names that model families use
    "vocab_size": _WIDTH,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "model_dim"), _WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size"), _WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), Range(0, 1 << 24, integer=True)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads", "head_dim"), _HEADS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), _EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), _POSITIONS),
    **dict.fromkeys(("rms_norm_eps", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"), _EPSILON),
    "rope_theta": Range(1e-3, 1e15),
}

QUANTIZATION: dict[str, Range] = {
    "bits": Range(1, 32, integer=True),
    "group_size": Range(1, 1 << 16, integer=True),
}

_SIDE = Range(1, 1 << 14, integer=True)  # pixels
_PATCH = Range(1, 1024, integer=True)  # pixels
_PIXELS = Range(1, 1 << 30, integer=True)  # Qwen's processors call a number of pixels an edge
_MERGE = Range(1, 64, integer=True)  # patches, frames or channels
MAX_GRID = 1024  # largest image_size divided by patch_size
_TILES = Range(1, 1024, integer=True)
_IMAGE_TOKENS = Range(1, 1 << 16, integer=True)

VISION: dict[str, Range] = {  # settings of the encoder of images in a folder's config.json, under the families' names
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "out_hidden_size", "projection_dim"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "depth"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "head_dim"), _HEADS),
    **dict.fromkeys(("image_size", "window_size"), _SIDE),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), _PATCH),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), _MERGE),
    **dict.fromkeys(("position_embedding_size", "default_output_length"), Range(1, 1 << 20, integer=True)),
    "global_head_dim": _HEADS,
    "pooling_kernel_size": _MERGE,
    "tokens_per_second": Range(0.001, 1000.0),
    **dict.fromkeys(("num_channels", "in_channels", "in_chans"), _MERGE),
    **dict.fromkeys(("deepstack_visual_indexes", "fullatt_block_indexes"), Range(0, 1023, integer=True)),
    "num_position_embeddings": Range(1, 1 << 24, integer=True),
    "vocab_size": _WIDTH,
    "mlp_ratio": Range(0.01, 1024.0),
    "rope_theta": MODEL["rope_theta"],
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), _EPSILON),
}

IMAGES: dict[str, Range] = {  # settings of images beside those of the encoder, which some families have in config.json
    **dict.fromkeys(
        [f"{kind}_token_{name}" for kind in ("image", "video") for name in ("index", "id")],
        Range(0, 1 << 24, integer=True),
    ),
    **dict.fromkeys(("mm_tokens_per_image", "image_seq_length"), _IMAGE_TOKENS),
    **dict.fromkeys(("min_dynamic_patch", "max_dynamic_patch"), _TILES),
    **dict.fromkeys(("scale_factor", "spatial_merge_size"), _MERGE),
    "force_image_size": _SIDE,
    "downsample_ratio": Range(0.001, 64.0),
    "vision_feature_layer": Range(-1024, 1024, integer=True),
}

ROPE: dict[str, Range] = {"mrope_section": Range(0, 1 << 16, integer=True)}

PROCESSOR: dict[str, Range] = {  # settings of image and video processors; keys of a nested object are written name.key
    "size": _SIDE,
    "crop_size": _SIDE,
    "patch_size": _PATCH,
    "max_image_size": _SIDE,
    **{f"{name}.{side}": _SIDE for name in ("size", "crop_size") for side in ("height", "width")},
    **{f"patch_size.{side}": _PATCH for side in ("height", "width")},
    **dict.fromkeys(("size.shortest_edge", "size.longest_edge", "max_image_size.longest_edge"), _PIXELS),
    **dict.fromkeys(("size.min_pixels", "size.max_pixels", "min_pixels", "max_pixels"), _PIXELS),
    **dict.fromkeys(("merge_size", "temporal_patch_size", "spatial_merge_size"), _MERGE),
    **dict.fromkeys(("min_patches", "max_patches"), _TILES),
    **dict.fromkeys(("image_seq_length", "image_seq_len"), _IMAGE_TOKENS),
    "max_soft_tokens": _IMAGE_TOKENS,
    "pooling_kernel_size": _MERGE,
    "num_additional_image_tokens": Range(0, 1 << 16, integer=True),
    "image_mean": Range(-1e6, 1e6),
    "image_std": Range(1e-6, 1e6),
    "rescale_factor": Range(1e-9, 1e6),
    "resample": Range(0, 5, integer=True),
    "fps": PARAMETERS["fps"],
}

MAX_ALIASES = 10_000
MAX_ARMS = 16
MAX_STOP_STRINGS = 8
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_MESSAGES = 4096
MAX_RECEIVED_BYTES = 64 << 20  # bytes of all bodies that are being received or read
MAX_STORED_RESPONSES = 1024  # responses that later requests may continue
MAX_STORED_BYTES = 64 << 20  # bytes of those responses and their conversations
MAX_BATCH_FILES = 1000  # files of batches that are kept
MAX_BATCH_LINES = 50_000  # requests of a batch
MAX_BATCH_REQUESTS = 64  # requests of batches that run at once
MAX_OPEN_BATCHES = 100  # batches that have not ended
MAX_CUSTOM_ID = 512  # characters of a caller's name for a request of a batch
MAX_MESSAGE_DEPTH = 32  # levels of lists and objects inside a message
MAX_MESSAGE_VALUES = 131_072  # keys, texts, numbers, lists and objects in all messages of a conversation
MAX_TOOLS = 1024  # functions that one request may offer
MAX_TOOL_DEPTH = 64  # levels of lists and objects in the list of tools
MAX_TEMPLATE_VARIABLES = 64  # variables of the chat template that one request may set
MAX_PROMPTS = 64
MAX_TRAJECTORIES = 4096  # trajectories in one body
MAX_OPEN_TRAJECTORY_BYTES = 64 << 20  # bytes of all trajectories whose reward is still missing
MAX_FEEDBACK = 4096  # entries of one export of feedback
MAX_COMMENT = 16_384  # characters of what somebody says of a completion
MAX_TRAINING_JOBS = 16  # training jobs that wait for their turn
MAX_METADATA_BYTES = 65_536  # metadata of one request, as JSON
MAX_METADATA_DEPTH = 16
MAX_JSON_DEPTH = 64
MAX_TEXT_BYTES = 4 << 20  # bytes of one text to be tokenised, or of token ids to be turned into text
MAX_TEXT_REPLY = 64 << 20  # bytes of the token ids and pieces of one text, or of the text of token ids
MAX_TEXT_MEMORY = 512 << 20  # bytes of memory that tokenising long texts may use
MAX_WAITING_TEXT = 32 << 20  # bytes of texts that wait to be rendered or tokenised, or are being so
MAX_TEMPLATE_BYTES = 1 << 20  # bytes of a chat template
MAX_TEMPLATE_OUTPUT = 16 << 20  # bytes that a chat template may print
MAX_TEMPLATE_MEMORY = 512 << 20  # bytes of memory that a chat template may use
MAX_IMAGES = 16  # images of one request
MAX_FRAMES = 128  # frames of all videos of one request
MAX_IMAGE_BYTES = 16 << 20  # bytes of one image as it is sent or fetched
MAX_IMAGE_PIXELS = 50_000_000  # pixels of one image, which are counted before it is decoded
MAX_IMAGE_RATIO = 200  # length of an image's longer side over that of the shorter one
MAX_IMAGE_TOKENS = 4096  # tokens of one image, where the model's processor lets the image's size decide
MAX_VIDEO_TOKENS = 6144  # tokens of one video of the Qwen families, where each group of frames has at least one
MAX_IMAGE_PLACEHOLDERS = 1 << 16  # tokens of one image in any family; a folder may say how many they are
MAX_IMAGE_ARRAYS = 128 << 20  # bytes of the arrays that the model's processor makes of one image
MAX_REQUEST_ARRAYS = 192 << 20  # bytes of those arrays of all images of one request
MAX_OPEN_ARRAYS = 512 << 20  # bytes of those arrays of all requests that have not ended
MAX_KEPT_ARRAYS = 256 << 20  # bytes of those arrays that are kept for later turns of conversations
MAX_IMAGE_MEMORY = 2 << 30  # bytes of memory that decoding and processing one image may use
MAX_WAITING_IMAGES = 128 << 20  # bytes of images that wait to be decoded or are being decoded
MAX_GRAMMAR_BYTES = 512 << 10  # bytes of a JSON schema, a pattern, choices or a grammar of one request
MAX_GRAMMAR_MEMORY = 512 << 20  # bytes of memory that compiling a grammar may use
MAX_COMPILED_GRAMMARS = 384 << 20  # bytes of all compiled grammars in the engine, with their lexers
MAX_GUIDED_CHOICES = 1024
MAX_REWARD_PARTS = 8
MAX_REWARD_BYTES = 16 << 20  # bytes of one completion with its prompt and metadata
MAX_REWARD_TEXT = 128 << 10  # bytes of a completion to which a pattern or schema is applied
MAX_REWARD_ANSWERS = 64
MAX_PATTERN = 1024  # characters
MAX_SCHEMA_BYTES = 64 << 10
MAX_LORA_RANK = 512
MAX_INVOCATION_TOKENS = 256  # tokens that invoke an activated LoRA
MAX_LORA_ALPHA = 1e6
MAX_LORA_SCALE = 1e4
MAX_LORA_VALUE = 65504.0  # largest number of A, and of B times the scale: float16's largest
MAX_ADAPTER_BYTES = 8 << 30
MAX_CONFIG_BYTES = 1 << 20
MAX_EXAMPLE_BYTES = 64 << 20  # bytes of one line of a file of examples
MAX_PROGRAM_BODY = 16 << 20  # bytes of a body that a program sends, as it is sent; max_request_bytes if that is more
MAX_TINKER_UNPACKED = 32 << 20  # bytes of a body of Tinker's protocol buffers after decompression
MAX_TINKER_FIELDS = 1 << 18  # fields of the messages in it
MAX_TINKER_DATA = 4096  # examples in it
MAX_TINKER_NUMBERS = 1 << 23  # numbers of all tensors in it, sparse ones written out
MAX_TINKER_WIDTH = 128  # target tokens of one position
MAX_TINKER_SAMPLES = 1024  # samples of one request
MAX_TINKER_SESSIONS = 1024  # sessions of all clients
MAX_TINKER_MODELS = 1024  # models of one session, one after another
MAX_TINKER_SAMPLERS = 1 << 16  # sampling sessions of one session
MAX_TINKER_SAMPLERS_IN_ALL = 1 << 17  # sampling sessions of all sessions
MAX_TINKER_AHEAD = 4096  # requests of one model that may wait for one that is missing
MAX_TINKER_WAITING = 128 << 20  # bytes of one model's requests that wait, from which only the next one is taken
MAX_TINKER_RESULTS = 1 << 16  # results that wait to be fetched, and requests that wait for theirs
MAX_TINKER_RESULT_BYTES = 256 << 20  # bytes of results that wait to be fetched
MAX_TINKER_CHECKPOINTS = 10_000  # checkpoints of all clients
MAX_TINKER_METADATA = 16_384  # bytes of the metadata of a session, a run or a checkpoint, as JSON


def bounds(name: str) -> Meta:
    """Return the range of a parameter as a constraint for the annotated type of a field."""
    r = PARAMETERS[name]
    return Meta(ge=r.low, le=r.high)


def check(name: str, value: object, param: str | None = None) -> float | int:
    """Return `value` if it lies in the range of `name`; raise InvalidRequest naming `param` if not. NaN never
    passes.
    """
    r = PARAMETERS.get(name) or LEARNING[name]
    where = param or name
    kind = "an integer" if r.integer else "a number"
    if isinstance(value, bool) or not isinstance(value, int if r.integer else (int, float)):
        raise InvalidRequest(f"{where} must be {kind}", param=where, code="invalid_type")
    if not (r.low <= value <= r.high) or not math.isfinite(value):
        raise InvalidRequest(f"{where} must be {kind} {r}", param=where)
    return value


def check_model(table: Mapping[str, Range], values: Mapping[str, object], file: str, place: str = "") -> None:
    """Raise ModelError for the first of `values` outside its range in `table`, naming `file` and the key.

    `place` is the object of the file that holds the values. Nulls are skipped; of a list, which has a value for each
    layer, every item is checked.
    """
    for name, r in table.items():
        value = values.get(name)
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            number = isinstance(item, int if r.integer else (int, float)) and not isinstance(item, bool)
            if not number or not r.low <= item <= r.high:  # type: ignore[operator]
                what = "an integer" if r.integer else "a number"
                field = f"{place}.{name}" if place else name
                raise ModelError(f"{file}: {field} must be {what} from {r.low:,} to {r.high:,}", param=field)


def check_name(value: str, param: str = "name") -> str:
    """Return `value` if it is a legal adapter name, which is never a path; raise InvalidRequest if not."""
    if not NAME.fullmatch(value) or value.endswith("."):
        raise InvalidRequest(
            f"{param} must be 1 to 64 letters, digits, '.', '_' and '-', starting with a letter or digit",
            param=param,
        )
    return value


def check_token_ids(ids: object, vocab_size: int, param: str) -> tuple[int, ...]:
    """Return the ids if all lie in [0, vocab_size); raise InvalidRequest naming `param` if not.

    An array library that does not check its indices must never see another id.
    """
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequest(f"{param} must be a list of token ids", param=param, code="invalid_type")
    for i, t in enumerate(ids):
        if isinstance(t, bool) or not isinstance(t, int):
            raise InvalidRequest(f"{param}[{i}] must be a token id", param=param, code="invalid_type")
        if not 0 <= t < vocab_size:
            raise InvalidRequest(
                f"{param}[{i}] = {str(t)[:24]} is not in the vocabulary of {vocab_size} tokens", param=param
            )
    return tuple(ids)
