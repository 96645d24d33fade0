"""Reading one long prompt alone, with measurements of its longest step and of the memory that it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model.overlap import GREEDY, tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.model.step.parts import Flight
from mlx_tandem.types import EngineInfo


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


def read(
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
