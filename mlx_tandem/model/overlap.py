"""Decides at start whether steps may be in flight together on this device.

Steps are launched one behind the other as the engine does it: decodes, chunks of prompts, copies of blocks, loads
and forks. None of them may copy the pool. Where kernels write the pool and MLX orders them by their outputs only,
the pool must afterwards hold the same as when each step is launched after the one before it is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan, Tables
from mlx_tandem.model.ops import inplace
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo, SamplingParams

log = logging.getLogger(__name__)

ALLOWED = 64 << 20
"""Bytes beside the pool that decode steps may use, unless a quarter of the pool is more."""

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def decide_overlap(runner: MLXRunner, info: EngineInfo) -> None:
    """Set `runner.one_at_a_time` if steps in flight together copy the pool or leave other contents in it.

    Raises:
        RuntimeError: Steps copy the pool even when they are dispatched one at a time.
    """
    problem = _copying(runner, info)
    if problem and not runner.one_at_a_time:
        log.warning("each step is dispatched when the one before is done: in flight together %s", problem)
        runner.one_at_a_time = True
        problem = _copying(runner, info)
    if problem:
        raise RuntimeError(f"{problem}: the pool is copied instead of written in place")
    if not runner.one_at_a_time and inplace.writing().by_outputs and disturbed(runner, info, 1):
        log.warning("each step is dispatched when the one before is done: in flight together they disturb each other")
        runner.one_at_a_time = True


def _copying(runner: MLXRunner, info: EngineInfo) -> str:
    """Return which steps used more memory than they should; empty if none did.

    An excess is measured twice: a GPU releases what operations held only some time after they are done.
    """
    problem = _too_much(runner, info)
    if not problem:
        return ""
    mx.synchronize()
    again = _too_much(runner, info)
    if not again:
        log.warning("once %s; looked at again they did not", problem)
    return again


def _too_much(runner: MLXRunner, info: EngineInfo) -> str:
    """Return which steps used more memory than they should in one measurement; empty if none did."""
    allowed = max(runner.pool_bytes // 4, ALLOWED)
    decodes, others = decode_growth(runner, info), _growth(runner, _mixed(info))
    for kind, bytes_, most in (
        ("decode steps", decodes, allowed),
        ("chunks, copies, loads and forks", others, allowed + info.memory.activations),
    ):
        if bytes_ > most:
            return f"{kind} used {bytes_ >> 20} MiB beside the KV pool of {runner.pool_bytes >> 20} MiB"
    return ""


def decode_growth(runner: MLXRunner, info: EngineInfo) -> int:
    """Return the bytes by which memory grows while a few decode steps run, each planned while the one before it
    runs.
    """

    def decode(position: int) -> StepPlan:
        return StepPlan((_row(info, position, (CARRY,), 1),))

    runner.wait(runner.launch(decode(1)))
    return _growth(runner, [decode(position) for position in range(2, min(8, info.block_size))])


def _growth(runner: MLXRunner, plans: Sequence[StepPlan]) -> int:
    """Return the bytes by which memory grows while these steps run, launched one behind the other."""
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    _run(runner, plans)
    return int(mx.get_peak_memory() - before)


def _run(runner: MLXRunner, plans: Sequence[StepPlan], *, apart: bool = False) -> None:
    """Run the steps, each launched while the one before it runs, or with `apart` after it is done."""
    flights = []
    for plan in plans:
        flights.append(runner.launch(plan))
        if apart or len(flights) > 1:
            runner.wait(flights.pop(0))
    for flight in flights:
        runner.wait(flight)


def disturbed(runner: MLXRunner, info: EngineInfo, times: int) -> int:
    """Return in how many runs steps in flight together leave other contents in the pool than the same steps apart."""
    _run(runner, _mixed(info), apart=True)  # later runs find the same old contents in their blocks
    right = _contents(runner, info, apart=True)
    return sum(_contents(runner, info, apart=False) != right for _ in range(times))


def _contents(runner: MLXRunner, info: EngineInfo, *, apart: bool) -> tuple[bytes, ...]:
    """Return the contents of the pool's blocks after steps in flight together or apart."""
    _run(runner, _mixed(info), apart=apart)
    saved = runner.launch(StepPlan((), saves=tuple(_everywhere(info, *range(1, 1 + _blocks(info))))))
    return tuple(runner.wait(saved).saves)


def _mixed(info: EngineInfo) -> list[StepPlan]:
    """Return steps of every other kind, each of which reads what the one before it has written.

    They are chunks of a prompt, a decode, a fork with its copy, and a block that is loaded; in a pool of few blocks
    only a chunk.
    """
    size = info.block_size
    if _blocks(info) < 4 or info.max_model_len < 2 * size:
        return [StepPlan((_row(info, 0, (1,) * (size // 2), 1),), seatings=(_seating(0),))]
    at = size + size // 2
    forked = (_row(info, at + 1, (CARRY,), 1, 2), _row(info, at + 1, (3,), 1, 3, seat=1))[: info.max_num_seqs]
    copies = tuple(zip(_everywhere(info, 2), _everywhere(info, 3), strict=True))
    contents = [bytes(pool.block_bytes) for pool in info.memory.pools]
    loads = tuple(zip(_everywhere(info, 4), contents, strict=True))
    return [
        StepPlan((_row(info, 0, (1,) * size, 1, 2),), seatings=(_seating(0),)),
        StepPlan((_row(info, size, (2,) * (at - size), 1, 2),)),
        StepPlan((_row(info, at, (CARRY,), 1, 2),)),
        StepPlan(forked, copies=copies, seatings=tuple(_seating(row.seat) for row in forked[1:])),
        StepPlan((_row(info, at + 2, (CARRY,), 4, 2),), loads=loads),
        StepPlan((_row(info, at + 3, (CARRY,), 4, 2),)),
    ]


def _row(info: EngineInfo, start: int, tokens: tuple[int, ...], *blocks: int, seat: int = 0) -> Row:
    """Return a row of a step: `tokens` at positions from `start` on, in these blocks."""
    kind = RowKind.DECODE if tokens == (CARRY,) else RowKind.PROMPT
    return Row(kind, seat, seat, 0, start, tokens, tables_of(info, *blocks), True)


def _seating(seat: int) -> Seating:
    return Seating(seat, GREEDY, 0, 1, (0,))


def _blocks(info: EngineInfo) -> int:
    """Return how many blocks of each pool these steps may use, at most four."""
    return min(4, *(pool.num_blocks - 1 for pool in info.memory.pools))


def tables_of(info: EngineInfo, *blocks: int) -> Tables:
    """Return a table of these blocks for each pool. Block 1 is the first behind the pool's scratch block.

    A pool of states has few blocks; from its last one on, that one stands for all.
    """
    lasts = [pool.num_blocks - 1 if pool.state else max(blocks) for pool in info.memory.pools]
    each = zip(_firsts(info), lasts, strict=True)
    return tuple(tuple(first + min(block, last) for block in blocks) for first, last in each)


def _everywhere(info: EngineInfo, *blocks: int) -> list[int]:
    """Return the ids of these blocks in all pools."""
    return [block for table in tables_of(info, *blocks) for block in table]


def _firsts(info: EngineInfo) -> Iterator[int]:
    """Yield the id of each pool's first block."""
    first = 0
    for pool in info.memory.pools:
        yield first
        first += pool.num_blocks
