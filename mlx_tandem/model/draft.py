"""The draft model beside the served one: the settings with which it is built, and its part of the memory."""

from __future__ import annotations

import dataclasses
from functools import cache

import msgspec

from mlx_tandem.config import (
    CacheConfig,
    DiskCacheConfig,
    DutyConfig,
    EngineConfig,
    LoraConfig,
    ParallelConfig,
    SpeculationConfig,
)
from mlx_tandem.engine.budget import Needs
from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.kernel_checks import examine
from mlx_tandem.model.loader import load_unread, unpack_for_cpu, weights
from mlx_tandem.types import MemoryBudget

replace = msgspec.structs.replace


def draft_settings(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """Return the settings of the draft model of an engine, with so many blocks. Raises ModelError if it has none."""
    path = config.speculation.draft_model
    if not path:
        raise ModelError("--spec-decode draft needs --draft-model-path", param="draft_model")
    kv = config.cache
    return replace(
        config,
        model=replace(config.model, path=path, images=False, max_model_len=0, random_weights=False),
        cache=CacheConfig(kv.block_size, num_blocks, attention_backend=kv.attention_backend),
        disk=DiskCacheConfig(),
        lora=LoraConfig(max_loras=0),
        duty=DutyConfig(),
        speculation=SpeculationConfig(),
        parallel=ParallelConfig(),  # the first rank drafts by itself
        deterministic=False,  # the bits of drafts change no answer
    )


@cache
def _sizes(settings: EngineConfig) -> tuple[int, int]:
    """Return the bytes of a draft model's weights and of one of its blocks, without reading any weight."""
    limit = backend.current().memory_limit(settings.memory_limit_gb)
    model = unpack_for_cpu(load_unread(settings.model, lambda stage, fraction: None), settings.model, limit.size)
    found = examine(settings, model, evaluate=False)
    if found.states:
        raise ModelError(
            f"the draft model's model_type {model.model_type!r} keeps states, which cannot follow drafts that are not "
            "accepted",
            param="draft_model",
        )
    size = sum(p.nbytes for p in weights(model.module))
    return size, settings.cache.block_size * sum(layer.bytes_per_token() for layer in found.layers)


def with_draft(config: EngineConfig, needs: Needs) -> Needs:
    """Return what a model and its draft model need: each block of the first pool has one of the draft model beside it.

    Steps of the draft model fit into the activations of the larger model.
    """
    size, block = _sizes(draft_settings(config, 0))
    return dataclasses.replace(needs, weights=needs.weights + size, block=needs.block + block)


def without_draft(config: EngineConfig, memory: MemoryBudget) -> MemoryBudget:
    """Return the budget of `with_draft` with the blocks of the model alone; `pool` counts the others, too."""
    _, block = _sizes(draft_settings(config, 0))
    first, *others = memory.pools
    own = replace(first, block_bytes=first.block_bytes - block)
    return replace(memory, block_bytes=memory.block_bytes - block, pools=(own, *others))
