"""Reads one long prompt by itself, and measures its longest step and the memory that it takes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import mlx.core as mx

from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model.overlap import GREEDY, tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo


@dataclass(frozen=True)
class LongPrompt:
    """The measurements of a prompt that was read in steps, each launched while the one before it ran."""

    tokens: int
    """Tokens that were read, all of them or those that the time was enough for."""

    chunk: int
    """Tokens of a step."""

    seconds: float
    longest: float
    """Seconds of the longest step."""

    bytes: int
    """Memory beside the weights, the pool and everything else that was there before."""


def room(info: EngineInfo) -> int:
    """Return the tokens that a sequence may have in every pool at once."""
    pools = [group.pool for group in open_groups(info.memory, info.block_size) if not group.snapshots]
    return min(info.max_model_len, *(pool.usable_blocks * info.block_size for pool in pools))


def read(runner: MLXRunner, info: EngineInfo, tokens: int, seconds: float) -> LongPrompt:
    """Read a prompt of so many tokens, of which there is room for, and stop early after so many seconds."""
    chunk = info.memory.chunk_tokens
    blocks = range(1, 1 + -(-tokens // info.block_size))

    def step(start: int) -> StepPlan:
        length = min(chunk, tokens - start)
        row = Row(RowKind.PROMPT, 0, 0, 0, start, (1,) * length, tables_of(info, *blocks), True)
        return StepPlan((row,), seatings=() if start else (Seating(0, GREEDY, 0, 1, (0,)),))

    for _ in range(2):  # kernels are compiled
        runner.wait(runner.launch(step(0)))
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    started = ended = time.perf_counter()
    longest, done, flights = 0.0, 0, [runner.launch(step(0))]
    for start in (*range(chunk, tokens, chunk), tokens):
        if start < tokens and ended - started < seconds:
            flights.append(runner.launch(step(start)))
        if not flights:
            break
        runner.wait(flights.pop(0))
        now = time.perf_counter()
        longest, ended, done = max(longest, now - ended), now, min(done + chunk, tokens)
    return LongPrompt(done, chunk, ended - started, longest, mx.get_peak_memory() - before)
