"""A plan: what a model, its adapters and learning take on a machine, what fits beside them, and how fast steps are."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from mlx_tandem.capacity.machines import Chip, Machine
from mlx_tandem.capacity.speed import decode_ms, prompt_seconds
from mlx_tandem.capacity.work import StepWork
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.types import MemoryBudget

PROMPTS = (1024, 8192)
"""Lengths of prompts in tokens for which the time is computed."""


class Capacity(Struct, frozen=True):
    """The decisions of a start for a model on some devices, which are counted as one."""

    work: StepWork
    memory: MemoryBudget
    longest: int  # tokens of a sequence
    machine: Machine | None  # None: this machine, whose device is in no table
    device: str


class StepTime(Struct, frozen=True):
    """A step in which every row decodes."""

    rows: int
    step_ms: float
    tokens_per_s: float
    adapters: int
    step_ms_with_adapters: float
    tokens_per_s_with_adapters: float
    fits: bool  # whether the pool holds so many rows


class PromptTime(Struct, frozen=True):
    """The time that a prompt takes alone."""

    tokens: int
    seconds: float


class Speed(Struct, frozen=True):
    """The predicted times on a machine of the table."""

    bandwidth_gb_s: float
    tflops: float
    source: str
    decode: tuple[StepTime, ...]
    prompts: tuple[PromptTime, ...]


class CapacityPlan(Struct, frozen=True):
    """A plan. Bytes are those of one device; streams and tokens are those of all devices together."""

    model: str
    device: str
    devices: int
    work: StepWork
    limit: int
    limit_reason: str
    weights: int
    activations: int
    learning: int
    adapter_slots: int
    adapter_slots_wanted: int
    pool: int
    adapters: int
    rank: int
    slot_bytes: int  # of one adapter
    host_bytes: int  # of one adapter that waits in the host's memory
    drive_bytes: int  # of one adapter's file in 16 bits
    context: int
    max_num_seqs: int
    longest: int
    pool_tokens: int
    streams: dict[int, int]  # how many fit at once, by their tokens
    speed: Speed | None


def check_group(work: StepWork, devices: int) -> None:
    """Raise InvalidRequest unless the heads of a model can be divided over so many devices."""
    for name, heads in (("query", work.heads), ("key", work.kv_heads)):
        if heads % devices:
            raise InvalidRequest(
                f"the model has {heads} {name} heads, which {devices} devices cannot share evenly",
                param="tensor_parallel_size",
            )


def steps(
    work: StepWork, chip: Chip, rows: Sequence[int], context: int, adapters: int, devices: int, most: int
) -> tuple[StepTime, ...]:
    """Return the decode steps of so many rows at `context` tokens each, of which the pool holds `most`."""
    found = []
    for count in rows:
        plain = decode_ms(work, chip, count, context, devices=devices)
        used = min(adapters, count)
        adapted = decode_ms(work, chip, count, context, used, devices)
        tokens = 1e3 * count
        found.append(StepTime(count, plain, tokens / plain, used, adapted, tokens / adapted, count <= most))
    return tuple(found)


def prompts(work: StepWork, chip: Chip, longest: int, devices: int) -> tuple[PromptTime, ...]:
    """Return the times of prompts that the model takes."""
    return tuple(PromptTime(n, prompt_seconds(work, chip, n, devices)) for n in PROMPTS if n <= longest)
