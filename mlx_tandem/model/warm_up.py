"""Warm-up of a new runner: trace the usual steps, time prompts and decodes, and check that steps may overlap.

It is bounded in seconds and not in shapes: where steps are slow, fewer of them are run. What was not run is compiled
when it is first used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx

from mlx_tandem.engine.cost import CostModel
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.kv.groups import open_groups
from mlx_tandem.model import backend
from mlx_tandem.model.choices import Pace
from mlx_tandem.model.loader import Report
from mlx_tandem.model.overlap import check_deterministic, decide_overlap, tables_of
from mlx_tandem.model.runner import MLXRunner
from mlx_tandem.types import EngineInfo, SamplingParams

log = logging.getLogger(__name__)

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)

SAMPLED = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, top_k=20, logprobs=1)

CHUNKS = ((8, 0), (64, 0), (8, 1024), (64, 1024), (256, 0), (256, 1024), (64, 6144))
"""Prompt chunks that are timed: the number of tokens, and the number of positions before them."""

ENOUGH_CHUNKS = 4
"""Number of chunks, from the first on, that determine the cost model. The others make it more exact."""

CHUNK_SECONDS = 1.0
"""Seconds spent on timed chunks after which no further chunk is timed, once there are enough of them."""

MOST_SECONDS = 3.0
"""Seconds of prompt chunks, and of decode steps, beyond which no further shape is run.

On a CPU no further shape is run either once warm-up itself has taken so long. There MLX calls g++ for each function
that it has not compiled before, a sixth of a second each. On a GPU only the steps' own times count: how many tokens of
prompts a step may have depends on them.
"""

AGAIN_SECONDS = 0.5
"""Maximum seconds of a CPU's warm-up in a later start, which only loads what an earlier one has compiled."""


_DRAFTS = 4
"""Tokens of the rows that verify drafts, unless a head of the model makes one draft at a time."""

RUNS = 3
"""Most runs of each timed step. The first pays for tracing and does not count."""

AGREEMENT = 1.1
"""Ratio of a step's two shortest times at which it is not run again."""

LONG = 20.0
"""Milliseconds from which a step is timed once: an interruption of a few milliseconds is then a small share of it."""


SLOW = 100.0
"""Milliseconds of a step from which it is not run at start only to compile it. Compiling takes a few milliseconds.

From so many milliseconds of a decode step on, steps run one at a time without a check: an overlap would save the host's
few milliseconds.
"""


def warm_up(
    runner: MLXRunner,
    info: EngineInfo,
    cost: CostModel,
    report: Report,
    device_bytes: int,
    given: Pace | None = None,
    *,
    method: str = "none",
) -> Pace:
    """Run the first steps, fit `cost` to the times of prompt chunks and decodes, and decide whether steps may overlap.

    Return the times and the decision. With those of another process, `given`, each step runs once, so that it is
    compiled, and nothing is timed. Under `--deterministic` the bits of a few steps are checked first (ModelError).

    Args:
        runner: The runner, whose pool is empty.
        info: What the engine is.
        cost: The model that is fitted.
        report: Function that is told the progress.
        device_bytes: The memory of the device.
        given: The pace of another process that runs the same model on the same kind of device.
        method: Where the drafts come from that steps will verify, as in `SpeculationConfig`.
    """
    report("warming up", 0.0)
    if info.deterministic:
        check_deterministic(runner, info)
    if given is not None and not given.whole:
        given = None
    began, most = time.monotonic(), MOST_SECONDS if given is None else AGAIN_SECONDS

    def is_late() -> bool:
        return backend.current().arithmetic.compiled_by_the_host and time.monotonic() - began > most

    if given is None:
        chunks, decodes = (
            tuple(_time_chunks(runner, info, report, is_late)),
            tuple(_time_decodes(runner, info, is_late)),
        )
        slow = _is_slow(decodes)
        if slow:
            runner.one_at_a_time = True
        else:
            decide_overlap(runner, info)
        pace = Pace(chunks, decodes, runner.one_at_a_time, whole=not slow)
    else:
        pace = given
        runner.one_at_a_time = pace.one_at_a_time
        for plan in _usual_steps(info, pace):
            if is_late():
                break
            runner.wait(runner.launch(plan))
    if given is None or not is_late():  # most requests sample, and later starts should find compiled what that takes
        _sample_once(runner, info)
    if method != "none" and not _is_slow(pace.decodes) and not is_late():
        _verify_some(runner, info, 2 if method == "mtp" else _DRAFTS, proposes=method == "mtp")
    cost.fit(list(pace.chunks), list(pace.decodes))
    # Serving hardly asks again for arrays of these sizes; and with so much kept in the cache, what serving frees would
    # go back to the system each time.
    mx.clear_cache()
    # MLX empties its cache from 95 % on for what does not come from the driver's pool; 90 % stays below that.
    if not backend.current().keep_freed_memory(int(0.9 * device_bytes)):
        log.warning("the driver does not keep freed memory: steps that need some again may take tens of milliseconds")
    mx.reset_peak_memory()
    report("warming up", 1.0)
    return pace


def _is_slow(decodes: Sequence[tuple[int, float]]) -> bool:
    """Return whether a step that decodes one row takes long."""
    return bool(decodes) and decodes[0][1] >= SLOW


def _usual_steps(info: EngineInfo, pace: Pace) -> Iterator[StepPlan]:
    """Yield the steps that another process has timed and that do not take long, each once."""
    chunks = {(length, context): ms for length, context, ms in pace.chunks}
    for length, context in _chunks(info):
        if chunks.get((length, context), SLOW) < SLOW:
            yield _chunk(info, length, context)
    decodes = dict(pace.decodes)
    for rows in _decodes(info):
        if decodes.get(rows, SLOW) < SLOW:
            yield _decode(info, rows, 0)


def _chunks(info: EngineInfo) -> list[tuple[int, int]]:
    """Return those of CHUNKS for which the pool has room, or the longest that fits if it has room for none."""
    pools = [group.pool for group in open_groups(info.memory, info.block_size) if not group.snapshots]
    room = min(info.max_model_len, *(pool.usable_blocks * info.block_size for pool in pools))
    return [(length, context) for length, context in CHUNKS if length + context <= room] or [(min(8, room), 0)]


def _chunk(info: EngineInfo, length: int, context: int) -> StepPlan:
    """Return a step with a chunk of a prompt; the first is without context, so that it takes the seat."""
    blocks = range(1, 1 + -(-(context + length) // info.block_size))
    row = Row(RowKind.PROMPT, 0, 0, 0, context, (0,) * length, tables_of(info, *blocks), True)
    return StepPlan((row,), seatings=() if context else (Seating(0, GREEDY, 0, 1, (0,)),))


def _time_chunks(
    runner: MLXRunner, info: EngineInfo, report: Report, is_late: Callable[[], bool]
) -> list[tuple[int, int, float]]:
    """Return (tokens, positions before them, milliseconds) of prompt chunks.

    Where there was time for chunks of one length only, longer ones are assumed to take as long for each token.
    """
    measured: list[tuple[int, int, float]] = []
    chunks = _chunks(info)
    for done, (length, context) in enumerate(chunks):
        # Each chunk runs twice at least. The first run of a new process compiles, so it says nothing about the second.
        spent = 2e-3 * sum(chunk[2] for chunk in measured)
        if done >= ENOUGH_CHUNKS and spent >= CHUNK_SECONDS:
            break
        if measured and (is_late() or spent + 2e-3 * _at_most(measured, length) > MOST_SECONDS):
            continue
        plan = _chunk(info, length, context)
        measured.append((length, context, _shortest(_milliseconds(runner, plan) for _ in range(RUNS))))
        report("warming up", (done + 1) / (len(chunks) + 1))
    if len(chunks) > 1 and len({chunk[0] for chunk in measured}) == 1:
        length, _, milliseconds = measured[0]
        measured += [(length * more, 0, milliseconds * more) for more in (2, 4, 8)]
    return measured


def _at_most(measured: list[tuple[int, int, float]], length: int) -> float:
    """Return the milliseconds that a chunk of so many tokens takes at most by those of shorter and longer ones."""
    return min(milliseconds * max(length / known, 1.0) for known, _, milliseconds in measured)


def _decodes(info: EngineInfo) -> list[int]:
    """Return the numbers of rows of timed decode steps: no more than seats, and none for which the pool has no room."""
    most = min(group.pool.usable_blocks for group in open_groups(info.memory, info.block_size))
    return sorted({min(rows, info.max_num_seqs) for rows in (1, 4, 16) if rows <= most})


def _decode(info: EngineInfo, rows: int, position: int) -> StepPlan:
    """Return a step in which so many short sequences decode at a position; they take their seats at the first."""
    seatings = tuple(Seating(seat, GREEDY, 0, 1, (0,)) for seat in range(rows))
    each = (Row(RowKind.DECODE, i, i, 0, position, (0,), tables_of(info, 1 + i), True) for i in range(rows))
    return StepPlan(tuple(each), seatings=() if position else seatings)


def _time_decodes(runner: MLXRunner, info: EngineInfo, is_late: Callable[[], bool]) -> list[tuple[int, float]]:
    """Return the (rows, milliseconds) of decode steps.

    Where there was time for one only, more rows are assumed to take as long each.
    """
    measured: list[tuple[int, float]] = []
    for rows in _decodes(info):
        if measured:
            at_most = measured[-1][1] * rows / measured[-1][0]
            if is_late() or 2e-3 * (sum(decode[1] for decode in measured) + at_most) > MOST_SECONDS:
                if len(measured) == 1:
                    measured.append((rows, at_most))
                break
        times = (_milliseconds(runner, _decode(info, rows, position)) for position in range(RUNS))
        measured.append((rows, _shortest(times)))
    return measured


def _shortest(times: Iterator[float]) -> float:
    """Return the shortest of a step's times but for the first, and take no more of them after a long one, or once two
    nearly agree.
    """
    next(times)
    taken = [next(times)]
    if taken[0] >= LONG:
        return taken[0]
    for milliseconds in times:
        taken = sorted([*taken, milliseconds])
        if taken[1] <= AGREEMENT * taken[0]:
            break
    return taken[0]


def _milliseconds(runner: MLXRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.wait(runner.launch(plan))
    return (time.perf_counter() - started) * 1e3


def _sample_once(runner: MLXRunner, info: EngineInfo) -> None:
    """Run a step that samples at random, so that its kernels are compiled before anything is served.

    On a machine that has never run them, compiling can take longer than the watchdog lets a step take.
    """
    row = Row(RowKind.PROMPT, 0, 0, 0, 0, (0,), tables_of(info, 1), True)
    runner.wait(runner.launch(StepPlan((row,), seatings=(Seating(0, SAMPLED, 0, 1, (0,)),))))


def _verify_some(runner: MLXRunner, info: EngineInfo, tokens: int, *, proposes: bool) -> None:
    """Run steps that verify drafts in rows of so many tokens, each behind the one before it, so that their kernels are
    compiled.

    Each kind of step runs once more than the number of runs before it is traced. proposes: whether the steps make
    drafts, too.
    """
    size = info.block_size
    blocks = range(1, 1 + -(-(1 + 2 * tokens) // size))
    pools = [group.pool for group in open_groups(info.memory, size)]
    if info.max_model_len < 1 + 2 * tokens or len(blocks) > min(pool.usable_blocks for pool in pools):
        return
    tables = tables_of(info, *blocks)
    for params in (GREEDY, SAMPLED):
        for _ in range(runner.compiled.untraced + 1):
            first = Row(RowKind.VERIFY, 0, 0, 0, 1, (0,) * tokens, tables, True)  # a state is there
            carried = (CARRY, *(0,) * (tokens - 1))
            behind = Row(RowKind.VERIFY, 0, 0, 0, 1 + tokens, carried, tables, True, slack=tokens - 1)
            flights = [
                runner.launch(StepPlan((first,), seatings=(Seating(0, params, 0, 1, (0,)),), proposes=proposes)),
                runner.launch(StepPlan((behind,), proposes=proposes)),
            ]
            for flight in flights:
                runner.wait(flight)
        for _ in range(2):  # behind the first of them, the second one is dispatched early if this device can do it
            runner.wait(runner.launch(StepPlan((first,), proposes=proposes)))
    runner.launch(StepPlan(()))  # no step comes next
