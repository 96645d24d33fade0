"""Measures whether decode steps write the KV pool in place on this device or copy it."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_tandem.config import CacheConfig, EngineConfig, ModelConfig
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import build
from mlx_tandem.model.overlap import decode_growth
from mlx_tandem.types import SamplingParams


@dataclass(frozen=True)
class Growth:
    """Bytes beside the pool that decode steps used. A copy of any of its arrays takes at least `copy` bytes."""

    pool: int
    copy: int
    overlapped: int | None
    """With each step dispatched while the one before runs; None: this device never does that."""

    one_at_a_time: int
    """With each step dispatched after the one before is done."""


def growth(model: str, num_blocks: int) -> Growth:
    """Return the growth of decode steps of the model in folder `model` over a pool of `num_blocks` blocks."""
    config = EngineConfig(ModelConfig(model), CacheConfig(num_blocks=num_blocks))
    built = build(config, {}, lambda stage, fraction: None)
    runner, info = built.runner, built.info
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (0,), ((1,),), True)
    runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(0, greedy, 0, 1, (0,)),))))
    overlapped = None if runner.one_at_a_time else decode_growth(runner, info)
    runner.one_at_a_time = True
    copy = runner.pool_bytes // (2 * info.layers)  # keys or values of one layer
    return Growth(runner.pool_bytes, copy, overlapped, decode_growth(runner, info))
