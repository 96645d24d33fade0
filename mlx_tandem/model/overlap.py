"""Decides at start whether steps may be in flight together on this device.

Steps are launched one behind the other as the engine does it: decodes, chunks of prompts, copies of blocks, loads
and forks. None of them may copy the pool. Where kernels write the pool and MLX orders them by their outputs only,
the pool must afterwards hold the same as when each step is launched after the one before it is done.

Under `--deterministic` a start also checks that a model's logprobs have the same bits whatever rows are computed beside
them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan, Tables, scored_positions
from mlx_tandem.errors import ModelError
from mlx_tandem.model.kernels import inplace
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
    decodes, others = decode_growth(runner, info), _growth(runner, _mixed(runner, info))
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
    _run(runner, _mixed(runner, info), apart=True)  # later runs find the same old contents in their blocks
    right = _contents(runner, info, apart=True)
    return sum(_contents(runner, info, apart=False) != right for _ in range(times))


def _contents(runner: MLXRunner, info: EngineInfo, *, apart: bool) -> tuple[bytes, ...]:
    """Return the contents of the pool's blocks after steps in flight together or apart."""
    _run(runner, _mixed(runner, info), apart=apart)
    saved = runner.launch(StepPlan((), saves=tuple(_everywhere(info, *range(1, 1 + _blocks(info))))))
    return tuple(runner.wait(saved).saves)


def _mixed(runner: MLXRunner, info: EngineInfo) -> list[StepPlan]:
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
    contents = [bytes(pool.block_bytes * runner.ranks) for pool in info.memory.pools]
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


# --- The same bits in any company ------------------------------------------------------------------------------------

LENGTHS = (70, 9, 20)
"""Tokens of the prompts. The first one's are compared; its keys are in two of the blocks that attention adds."""

CUT = 21
"""Tokens of the first chunk of the first prompt where it is read in two; fewer of a prompt that is not much longer."""

DECODED = 4
"""Tokens at the end of the first prompt that are read one by one where it decodes."""

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5, prompt_logprobs=5)

Likeliest = dict[int, tuple[tuple[int, float], ...]]
"""The likeliest tokens after positions of the first prompt, and their logprobs."""


def check_deterministic(runner: MLXRunner, info: EngineInfo) -> None:
    """Raise ModelError unless a prompt has the same logprobs in one piece, in chunks and decoded, alone and in company.

    Alone, all positions are compared. A product that depends on the number of rows gives some of them other bits.

    The prompts are shorter and fewer than LENGTHS says where the engine has no room for those. Where a sequence has no
    second token, nothing is compared.
    """
    size, lengths = info.block_size, _lengths(info)
    if lengths[0] < 2:
        return
    rng = np.random.default_rng(0)
    texts = [tuple(rng.integers(0, info.vocab_size, length).tolist()) for length in lengths]
    firsts = np.cumsum([1, *(-(-length // size) for length in lengths)]).tolist()

    def row(who: int, start: int, stop: int, *, decodes: bool = False, scored: bool = False) -> Row:
        tables = tables_of(info, *range(firsts[who], firsts[who + 1]))
        kind, targets = RowKind.DECODE if decodes else RowKind.PROMPT, texts[who][start + 1 : stop + 1]
        return Row(kind, who, who, 0, start, texts[who][start:stop], tables, True, targets if scored else ())

    def likeliest(steps: Sequence[Sequence[Row]]) -> Likeliest:
        """Return what these steps say of the first prompt, which is the first row of each."""
        seats = tuple(Seating(who, PARAMS, 0, len(text), text) for who, text in enumerate(texts))
        found: Likeliest = {}
        for n, rows in enumerate(steps):
            result = runner.wait(runner.launch(StepPlan(tuple(rows), seatings=() if n else seats)))
            found |= {rows[0].start + i: each.top for i, each in enumerate(result.scores.get(0, ()))}
            found |= {rows[0].start + len(rows[0].tokens) - 1: each.top for each in result.logprobs[0] or ()}
        return found

    whole, *others = lengths
    cut, first = min(CUT, whole - 1), max(1, whole - DECODED)
    company = [row(who, 0, length - 1) for who, length in enumerate(others, 1)]
    decoding = [row(who, length - 1, length, decodes=True) for who, length in enumerate(others, 1)]
    newest = [row(0, at, at + 1, decodes=True) for at in range(first, whole)]
    ways = {
        "in chunks alone": [[row(0, 0, cut, scored=True)], [row(0, cut, whole, scored=True)]],
        "as it decodes alone": [[row(0, 0, first)], *([each] for each in newest)],
    }
    if others:
        ways |= {
            "in chunks beside other rows": [[row(0, 0, cut), *company], [row(0, cut, whole), *decoding]],
            "as it decodes beside other rows": [[row(0, 0, first), *company], *([each, *decoding] for each in newest)],
        }
    expected = likeliest([[row(0, 0, whole, scored=True)]])
    for way, steps in ways.items():
        if any(expected[at] != found for at, found in likeliest(steps).items()):
            raise ModelError(
                f"--deterministic: on this device, a prompt of this model has other logprobs {way} than in one piece",
                param="deterministic",
            )


def _lengths(info: EngineInfo) -> list[int]:
    """Return the tokens of each prompt: those of LENGTHS, or as many as there is room for.

    No prompt is longer than what can be scored in one step.

    Prompts after the first are left out where the step has no row for them or the pool no two tokens.
    """
    size = info.block_size
    blocks = min(pool.num_blocks for pool in info.memory.pools) - 1  # the first one of a pool is scratch
    share = blocks // min(len(LENGTHS), info.max_num_seqs)
    others = [min(length, info.max_model_len, share * size) for length in LENGTHS[1 : info.max_num_seqs]]
    others = [length for length in others if length > 1]
    left = blocks - sum(-(-length // size) for length in others)
    return [min(LENGTHS[0], info.max_model_len, left * size, scored_positions(info.vocab_size)), *others]
