"""All settings, typed and nested; every field is a key of one YAML file, and most are options of the command line.

A value of 0 or None where the text says so means: decide at start from the device and the model.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    path: str  # a folder
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, else the model's own
    max_model_len: int = 0  # 0: the model's own limit
    random_weights: bool = False  # shapes only, for benchmarks


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    block_size: int = 16
    num_blocks: int = 0  # 0: from memory_fraction
    memory_fraction: float = 0.6  # of what the device has left after weights and activations
    prefix_caching: bool = True  # keep what is computed for prompts that begin alike
    kv_bits: Literal[4, 8, 16] = 16  # of a cached number; 16: as the model computes it
    kv_group_size: int = 64  # numbers that share a scale, at least; matters to 4 and 8 bits
    attention_backend: Literal["auto", "portable", "cuda", "metal"] = "auto"  # auto: the fastest that is right here


class DiskCacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The tier of the KV cache on the drive."""

    enabled: bool | None = None  # None: when a folder is named
    dir: str = ""  # empty: kv-cache in the user's own cache folder
    ttl_days: float = 7.0  # 0: for ever
    policy: Literal["evict_only", "write_through"] = "evict_only"  # when blocks go to it
    durability: Literal["best_effort", "persistent"] = "best_effort"  # persistent: synced, retried
    async_writes: bool = True  # else whoever gives a block waits until it is written
    writer_queue_size: int = 512  # blocks; more are dropped
    persistent_max_retries: int = 3
    flush_interval_s: float = 1.0
    max_size_gb: float = 50.0  # 0: no limit

    @property
    def on(self) -> bool:
        return bool(self.dir) if self.enabled is None else self.enabled


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: int = 64
    max_chunk_tokens: int = 0  # prompt tokens of one step; 0: from the device
    prefill_share: float = 0.6  # of a decode step's time, while others decode
    idle_prefill_ms: float = 0.0  # of one prefill step, while nobody decodes; 0: from the device
    prefill_batch_size: int = 0  # prompts read in one step; 0: as many as the time allows
    max_inflight_tokens: int = 0  # prompt and max_tokens of all that runs; 0: what the pool holds


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_loras: int = 16  # slots on the device beside the base
    max_lora_rank: int = 64
    max_cpu_loras: int = 0  # adapters in the engine's memory; 0: as many as max_cpu_lora_gb holds
    max_cpu_lora_gb: float = 2.0
    backend: Literal["auto", "gather", "windows", "fused"] = "auto"


Mode = Literal["inference_only", "training_only", "inference_and_training"]


class DutyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the device's time is shared between requests and learning, while both want it."""

    mode: Mode = "inference_and_training"
    inference: float = 0.7  # weights: only their ratio counts
    training: float = 0.3
    inter_token_p95_ms: float = 0.0  # learning waits while streams are slower than this; 0: no such limit
    micro_batch_tokens: int = 0  # of one forward and backward; 0: from the device
    trainer_rank: int = 0  # memory is kept for a trainer of this rank from the start; 0: for none


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    disk: DiskCacheConfig = field(default_factory=DiskCacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    duty: DutyConfig = field(default_factory=DutyConfig)
    memory_limit_gb: float = 0.0  # of the device, for all of this server; 0: from the device and what else runs
    heartbeat_seconds: float = 0.5
    stall_seconds: float = 60.0  # longer than the longest legal step


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    uds: str = ""  # path of a unix socket, in place of host and port
    ssl_certfile: str = ""  # PEM, with the certificates up to the root; empty: no TLS
    ssl_keyfile: str = ""  # PEM; empty: the key is in ssl_certfile
    root_path: str = ""  # prefix of paths, under which a reverse proxy serves this
    served_model_names: tuple[str, ...] = ()  # names of the base beside its folder's
    default_adapter: str = ""  # answers requests that name no model, or the base by its own name
    api_key: str = ""  # empty: none is asked for
    api_key_file: str = ""  # the key is the file's first line
    allowed_hosts: tuple[str, ...] = ()  # Host headers that are taken, beside the address that is bound
    chat_template: str = ""  # a file, or the template itself; empty: the model's own
    generation_config: str = "auto"  # sampling defaults: auto is the model folder's, vllm or none has none, or a folder
    seed: int | None = None  # begins the generator of seeds for requests that bring none; None: one by chance
    force_include_usage: bool = False  # streams end with their usage whether or not it was asked for
    max_logprobs: int = 20  # alternatives that a request may ask for at each token
    allowed_origins: tuple[str, ...] = ()  # of web pages that may use this from a browser; "*": any page
    default_max_tokens: int = 512
    max_prompt_tokens: int = 0  # 0: what fits
    max_generation_tokens: int = 0  # upper bound of max_tokens; 0: what fits
    max_n: int = 16  # choices of one prompt
    max_request_bytes: int = 1_048_576
    max_registered_adapters: int = 10_000  # versions of adapters that requests may register
    max_queue_size: int = 1024  # choices that may wait beside those that the batch has room for
    max_concurrent_requests: int = 0  # 0: no limit of its own
    memory_pressure_threshold: float = 0.9  # of the pool's blocks in use: more is refused from here on
    request_timeout_s: float = 0.0  # 0: none
    first_token_timeout_s: float = 300.0  # beside the time to read the prompt, as predicted; 0: none
    receive_timeout_s: float = 30.0  # for a request's headers, and for its body
    write_timeout_s: float = 60.0  # for a client that takes nothing of what is sent to it
    drain_seconds: float = 30.0
    chat_template_timeout_s: float = 1.0  # of CPU time, for the model's chat template and one conversation


class RewardSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One part of a composite reward."""

    function: str  # of training/rewards, or an entry point's name
    weight: float = 1.0
    options: dict[str, Any] = {}


class RLTrainingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The online loop: collect, score, update, validate, publish."""

    enabled: bool = False
    adapter: str = "policy"  # the name whose versions are trained and published
    init_from: str = ""  # an adapter's name to begin with; empty: a fresh one, which changes nothing
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_target_modules: tuple[str, ...] = ()  # last parts of module paths; empty: all linear layers
    seed: int = 0

    trajectory_buffer_size: int = 1000  # completions
    update_frequency: int = 100  # completions of one update
    scoring_batch_size: int = 32
    gradient_accumulation_steps: int = 1  # batches of update_frequency completions to one step of the optimiser
    max_staleness: int = 4  # versions that a completion may be behind
    scoring_function: str = ""  # for requests that collect and name none
    rewards: dict[str, tuple[RewardSpec, ...]] = {}  # composite rewards by name
    reward_workers: int = 1
    reward_timeout_s: float = 5.0
    reward_memory_mb: int = 512
    group_size: int = 0  # over 1: recorded prompts are sampled again, so many times, in training's share

    algorithm: Literal["grpo", "dr_grpo", "gspo", "cispo", "ppo", "importance_sampling", "dro"] = "grpo"
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0  # to the base model
    max_importance_ratio: float = 2.0  # of trainer to sampler, truncated there
    refuse_mismatch: float = 0.1  # mean k3 in nats between sampler and trainer from which on an update is refused

    guard_kl: float = 0.5  # mean k3 in nats that one update may move the policy
    guard_reward_drop: float = 0.1  # of the mean reward below its best, from which on the last good version comes back
    validation_prompts: str = ""  # a JSONL file whose mean reward each version must keep before it is published
    atropos_url: str = ""  # kept for a later version
    environment: str = ""


class CheckpointingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    checkpoint_dir: str = "./checkpoints"
    interval: int = 500  # updates
    keep_n_checkpoints: int = 10


class Arm(Struct, frozen=True, forbid_unknown_fields=True):
    """A share of an alias's traffic. `adapter`: a name, name@version or "base"."""

    adapter: str
    weight: float


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    adapters: tuple[tuple[str, str], ...] = ()  # (name, folder), read and checked at start
    adapter_root: str = ""  # a folder of adapter folders, each read when its name is first asked for
    aliases: tuple[tuple[str, tuple[Arm, ...]], ...] = ()
    rl_training: RLTrainingConfig = field(default_factory=RLTrainingConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
