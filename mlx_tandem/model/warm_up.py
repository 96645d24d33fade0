"""Warm-up of a new runner: trace the usual steps, time prompts and decodes, and check that steps may overlap."""

from __future__ import annotations

import logging
import time

import mlx.core as mx

from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model import device
from mlx_tandem.model.loader import Report
from mlx_tandem.model.overlap import decide_overlap, tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo, SamplingParams

log = logging.getLogger(__name__)

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

CHUNKS = ((8, 0), (64, 0), (256, 0), (8, 1024), (64, 1024), (256, 1024), (64, 6144))
"""Prompt chunks that are timed: the number of tokens, and the number of positions before them."""

RUNS = 4
"""Runs of each timed step. The first pays for tracing and does not count."""


def warm_up(runner: MLXRunner, info: EngineInfo, cost: CostModel, report: Report, device_bytes: int) -> None:
    """Run the first steps, fit `cost` to the times of prompt chunks and decodes, and decide whether steps may overlap.

    `report` is told how far it is; `device_bytes` is the memory of the device.
    """
    cost.fit(_time_chunks(runner, info, report), _time_decodes(runner, info))
    _sample_once(runner, info)
    decide_overlap(runner, info)
    # Serving hardly asks again for arrays of these sizes; and with so much kept in the cache, what serving frees would
    # go back to the system each time.
    mx.clear_cache()
    # MLX empties its cache from 95 % on for what does not come from the driver's pool; 90 % stays below that.
    if device.is_cuda() and not device.keep_freed_memory(int(0.9 * device_bytes)):
        log.warning("the driver does not keep freed memory: steps that need some again may take tens of milliseconds")
    mx.reset_peak_memory()
    report("warming up", 1.0)


def _time_chunks(runner: MLXRunner, info: EngineInfo, report: Report) -> list[tuple[int, int, float]]:
    """Return the (tokens, positions before them, milliseconds) of all CHUNKS for which the pool has room."""
    size = info.block_size
    pools = [group.pool for group in open_groups(info.memory, size)]
    room = min(info.max_model_len, *(pool.usable_blocks * size for pool in pools))
    chunks = [(length, context) for length, context in CHUNKS if length + context <= room] or [(min(8, room), 0)]
    measured = []
    for done, (length, context) in enumerate(chunks):
        blocks = range(1, 1 + -(-(context + length) // size))
        row = Row(RowKind.PROMPT, 0, 0, 0, context, (0,) * length, tables_of(info, *blocks), True)
        seatings = () if context else (Seating(0, GREEDY, 0, 1, (0,)),)
        times = [_milliseconds(runner, StepPlan((row,), seatings=seatings)) for _ in range(RUNS)]
        measured.append((length, context, min(times[1:])))
        report("warming up", (done + 1) / (len(chunks) + 1))
    return measured


def _time_decodes(runner: MLXRunner, info: EngineInfo) -> list[tuple[int, float]]:
    """Return the (rows, milliseconds) of steps in which 1, 4 and 16 short sequences decode.

    There are no more rows than seats, and none for which the pool has no room.
    """
    most = min(group.pool.usable_blocks for group in open_groups(info.memory, info.block_size))
    return [_time_decode(runner, info, min(rows, info.max_num_seqs)) for rows in (1, 4, 16) if rows <= most]


def _time_decode(runner: MLXRunner, info: EngineInfo, rows: int) -> tuple[int, float]:
    seatings = tuple(Seating(seat, GREEDY, 0, 1, (0,)) for seat in range(rows))
    times = []
    for position in range(RUNS):
        each = (Row(RowKind.DECODE, i, i, 0, position, (0,), tables_of(info, 1 + i), True) for i in range(rows))
        times.append(_milliseconds(runner, StepPlan(tuple(each), seatings=() if position else seatings)))
    return rows, min(times[1:])


def _milliseconds(runner: MLXRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.wait(runner.launch(plan))
    return (time.perf_counter() - started) * 1e3


def _sample_once(runner: MLXRunner, info: EngineInfo) -> None:
    """Run a step that samples at random, so that its kernels are compiled before anything is served.

    On a machine that has never run them, compiling can take longer than the watchdog lets a step take.
    """
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=20, logprobs=1)
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (0,), tables_of(info, 1), True)
    runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(0, params, 0, 1, (0,)),))))
