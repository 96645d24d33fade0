"""All settings, typed and nested; every field is also a command-line option and a key of one YAML file.

A value of 0 or None where the text says so means: decide at start from the device and the model.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    path: str  # a folder
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: float32 on CPU, else the model's own
    max_model_len: int = 0  # 0: the model's own limit
    random_weights: bool = False  # shapes only, for benchmarks


class CacheConfig(Struct, frozen=True, forbid_unknown_fields=True):
    block_size: int = 16
    num_blocks: int = 0  # 0: from memory_fraction
    memory_fraction: float = 0.6  # of what the device has left after the weights


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_num_seqs: int = 64
    max_chunk_tokens: int = 1024  # of one prefill step
    prefill_share: float = 0.6  # of a decode step's time, while others decode
    idle_prefill_ms: float = 200.0  # of one prefill step, while nobody decodes
    prefill_batch_size: int = 0  # prompts read in one step; 0: as many as the time allows
    max_inflight_tokens: int = 0  # prompt and max_tokens of all that runs; 0: what the pool holds


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_loras: int = 16  # slots on the device beside the base
    max_lora_rank: int = 64
    max_cpu_loras: int = 0  # adapters in the engine's memory; 0: as many as max_cpu_lora_gb holds
    max_cpu_lora_gb: float = 2.0
    backend: Literal["auto", "gather", "windows"] = "auto"


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    heartbeat_seconds: float = 0.5
    stall_seconds: float = 60.0  # longer than the longest legal step


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_names: tuple[str, ...] = ()  # names of the base beside its folder's
    default_adapter: str = ""  # answers requests that name no model, or the base by its own name
    api_key: str = ""  # empty: none is asked for
    api_key_file: str = ""  # the key is the file's first line
    allowed_hosts: tuple[str, ...] = ()  # Host headers that are taken, beside the address that is bound
    default_max_tokens: int = 512
    max_prompt_tokens: int = 0  # 0: what fits
    max_generation_tokens: int = 0  # upper bound of max_tokens; 0: what fits
    max_request_bytes: int = 1_048_576
    max_queue_size: int = 1024  # choices that may wait beside those that the batch has room for
    max_concurrent_requests: int = 0  # 0: no limit of its own
    memory_pressure_threshold: float = 0.9  # of the pool's blocks in use: more is refused from here on
    request_timeout_s: float = 0.0  # 0: none
    first_token_timeout_s: float = 300.0  # 0: none
    receive_timeout_s: float = 30.0  # for a request's headers, and for its body
    write_timeout_s: float = 60.0  # for a client that takes nothing of what is sent to it
    drain_seconds: float = 30.0


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
