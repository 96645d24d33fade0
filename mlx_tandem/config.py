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


class LoraConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_loras: int = 16  # slots on the device beside the base
    max_lora_rank: int = 64
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
    default_max_tokens: int = 512
    max_request_bytes: int = 1_048_576
    max_queue_size: int = 1024
    drain_seconds: float = 30.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    engine: EngineConfig
    server: ServerConfig = field(default_factory=ServerConfig)
    adapters: tuple[tuple[str, str], ...] = ()  # (name, folder)
