"""Trials of a model by `tandem doctor`: a long prompt, decode steps over a large pool, answers of mlx-lm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import generate_step
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from mlx_tandem.config import CacheConfig, EngineConfig, ModelConfig
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model.build import build
from mlx_tandem.model.overlap import GREEDY, decode_growth, tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.parts import Flight
from mlx_tandem.types import EngineInfo, SamplingParams

# --- One long prompt alone -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LongPrompt:
    """The measurements of a prompt that was read in steps, each launched while the one before it ran."""

    tokens: int
    """Tokens that were read: all of the prompt, or as many as the time allowed."""

    chunks: tuple[int, ...]
    """Tokens of each step."""

    seconds: float
    longest: float
    """Seconds of the longest step."""

    bytes: int
    """Bytes at the peak, without the weights, the pool and everything else that was in memory before."""


def room(info: EngineInfo) -> int:
    """Return the most tokens of a sequence for which the model and every pool have room."""
    pools = [group.pool for group in open_groups(info.memory, info.block_size) if not group.snapshots]
    return min(info.max_model_len, *(pool.usable_blocks * info.block_size for pool in pools))


def read_long_prompt(
    runner: MLXRunner, info: EngineInfo, tokens: int, seconds: float, chunk: Callable[[int, int], int]
) -> LongPrompt:
    """Read a prompt of `tokens` tokens, at most as many as `room` returns, and launch no more steps after `seconds`.

    `chunk`: returns the number of tokens of a step, given its position and the number of tokens that are left.
    """
    blocks = range(1, 1 + -(-tokens // info.block_size))

    def step(start: int) -> StepPlan:
        length = chunk(start, tokens - start)
        row = Row(RowKind.PROMPT, 0, 0, 0, start, (1,) * length, tables_of(info, *blocks), True)
        return StepPlan((row,), seatings=() if start else (Seating(0, GREEDY, 0, 1, (0,)),))

    for _ in range(2):  # compiles the kernels
        runner.wait(runner.launch(step(0)))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    started = ended = time.perf_counter()
    launched, longest = 0, 0.0
    chunks: list[int] = []
    flights: list[Flight] = []
    while flights or not chunks:
        while len(flights) < 2 and launched < tokens and ended - started <= seconds:
            plan = step(launched)
            flights.append(runner.launch(plan))
            chunks.append(len(plan.rows[0].tokens))
            launched += chunks[-1]
        runner.wait(flights.pop(0))
        now = time.perf_counter()
        longest, ended = max(longest, now - ended), now
    return LongPrompt(launched, tuple(chunks), ended - started, longest, mx.get_peak_memory() - before)


# --- Whether decode steps write the KV pool in place or copy it ------------------------------------------------------


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


# --- Reference answers by mlx-lm itself ------------------------------------------------------------------------------


class Oracle:
    """A model folder in float32, optionally with an adapter folder in mlx-lm's format."""

    def __init__(self, model: Path, adapter: Path | None = None):
        module, _ = load_model(model)
        self._module: Any = module if adapter is None else load_adapters(module, str(adapter))
        self._module.update(tree_map(lambda x: x.astype(mx.float32), self._module.parameters()))
        self._module.eval()

    def disagreement(
        self, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float]
    ) -> tuple[int, float]:
        """Return how many tokens of a greedy answer equal mlx-lm's, and the largest difference of a logprob among
        them.

        Where two tokens are equally likely but for rounding (1e-5), the rest of the answer is not compared.
        """
        apart = 0.0
        steps = generate_step(mx.array(list(prompt)), self._module, max_tokens=len(tokens))
        for same, ((own, theirs), token, logprob) in enumerate(zip(steps, tokens, logprobs, strict=False)):
            row = np.array(theirs)
            if own != token and row[own] - row[token] > 1e-5:
                return same, apart
            apart = max(apart, abs(float(row[token]) - logprob))
            if own != token:
                break
        return len(tokens), apart
