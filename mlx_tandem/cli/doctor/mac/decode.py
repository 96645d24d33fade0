"""Stages that measure the speed of decoding, in turn with mlx-lm's BatchGenerator in the same process."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

import msgspec

from mlx_tandem.cli.bench.script import Script, Work, run_script
from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.cli.doctor.child import Bench
from mlx_tandem.cli.doctor.mac import models
from mlx_tandem.cli.doctor.result import Failed, Figures, Outcome
from mlx_tandem.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.prompt_cost import prompt_seconds
from mlx_tandem.errors import ModelError
from mlx_tandem.types import EngineInfo, Request, SamplingParams

Prompts = list[tuple[int, ...]]

BLOCK = CacheConfig().block_size


def short(bench: Bench) -> Outcome:
    """Measure decoding after the shortest context."""
    return _measure(bench, models.dense(bench), 0)


def medium(bench: Bench) -> Outcome:
    """Measure decoding after the middle context."""
    return _measure(bench, models.dense(bench), 1)


def long(bench: Bench) -> Outcome:
    """Measure decoding after the longest context."""
    return _measure(bench, models.dense(bench), 2)


def hybrid(bench: Bench) -> Outcome:
    """Measure decoding of a model with recurrent layers after the middle context."""
    return _measure(bench, models.hybrid(bench), 1)


def _measure(bench: Bench, model: ModelConfig, which: int) -> Outcome:
    """Measure decoding after context number `which`, for each number of rows for which there is memory and time."""
    context = bench.sizes.contexts[which]
    left_out: list[str] = []
    rows = list(bench.sizes.rows)
    while rows:
        config = _config(model, max(rows), context + bench.sizes.tokens)
        if not (problem := _too_little_memory(config)):
            break
        left_out.append(f"{rows.pop()} x {context:,}: {problem}")
    if not rows:
        raise Failed("; ".join(left_out), "A smaller model is needed to measure this context here.")
    measured = _Measured(bench, config, rows, context, left_out)
    run_script(measured.script, config)
    return measured.outcome()


def _config(model: ModelConfig, rows: int, tokens: int) -> EngineConfig:
    """Return the settings of an engine with room for `rows` rows of `tokens` tokens each."""
    cache = CacheConfig(num_blocks=2 + rows * (1 + -(-tokens // BLOCK)))
    return EngineConfig(model, cache, scheduler=SchedulerConfig(max_num_seqs=rows))


def _too_little_memory(config: EngineConfig) -> str:
    """Return why an engine with these settings does not fit; empty if it does."""
    from mlx_tandem.model.build import plan

    try:
        _, longest = plan(config)
    except ModelError as e:
        return e.message.partition(". ")[0]
    needed = (config.cache.num_blocks - 2) // config.scheduler.max_num_seqs * BLOCK - BLOCK
    return "" if longest >= needed else f"sequences have {longest:,} tokens at most"


class _Measured:
    """The measurements after one context. An engine runs `script`; afterwards `outcome` returns the results."""

    def __init__(self, bench: Bench, config: EngineConfig, rows: list[int], context: int, left_out: list[str]):
        self._sizes = bench.sizes
        self._config = config
        self._rows = rows
        self._context = context
        self._left_out = left_out
        self._ids = count(1)
        self._random = random.Random(0)
        self._peer: Callable[[Prompts], Iterator[list[int]]] | None = None
        self._without_peer = ""
        self._said: list[str] = []
        self._figures: Figures = {}

    def script(self, info: EngineInfo) -> Script:
        """Measure each number of rows: the engine, mlx-lm, and the engine again."""
        for rows in self._rows:
            once = rows * prompt_seconds(info.prompt_cost, self._context, info.memory.chunk_tokens)
            if 3 * once > self._sizes.decode_seconds:  # mlx-lm also reads the prompts, perhaps more slowly
                self._left_out.append(f"{rows} x {self._context:,}: reading the prompts would take {once:.0f} s a time")
                continue
            if once < self._sizes.warm_seconds:  # in a longer run compiling takes a small share
                others = self._prompts(info, rows)
                yield self._work(others, self._sizes.tokens)
                self._run_peer(info, others)
            prompts = self._prompts(info, rows)
            first = yield self._work(prompts, 1)
            assert first is not None
            reads = first.timeline.prefill(rows * self._context)["prefill_tokens_per_s"]
            before = yield self._work(prompts, self._sizes.tokens)
            theirs = self._run_peer(info, prompts)
            after = yield self._work(prompts, self._sizes.tokens)
            assert before is not None and after is not None
            self._note(rows, [_rate(answers.timeline, rows) for answers in (before, after)], reads, theirs)

    def _prompts(self, info: EngineInfo, rows: int) -> Prompts:
        tokens = range(1, min(info.vocab_size, 256))
        return [tuple(self._random.choices(tokens, k=self._context)) for _ in range(rows)]

    def _work(self, prompts: Prompts, tokens: int) -> Work:
        params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
        return Work([m.Submit(Request(next(self._ids), prompt, params)) for prompt in prompts])

    def _run_peer(self, info: EngineInfo, prompts: Prompts) -> Timeline | None:
        """Return when mlx-lm's BatchGenerator drew its tokens; None if there is no room for it or it has failed."""
        if self._without_peer:
            return None
        from mlx_tandem.cli.bench.batch_generator import BatchGeneratorPeer, free_dropped_memory

        own = len(prompts) * (self._context + self._sizes.tokens) * info.kv_bytes_per_token
        needed = own + info.memory.weights
        if needed > info.memory.unassigned:
            self._without_peer = f"its {needed / 2**30:.1f} GB do not fit beside the engine's"
            return None
        try:
            if self._peer is None:
                model = msgspec.structs.replace(self._config.model, dtype=info.dtype)
                peer = BatchGeneratorPeer(model)
                greedy, most = (0.0, 1.0), self._sizes.tokens
                self._peer = lambda prompts: peer.generate(prompts, most, [greedy] * len(prompts))
            return Timeline.of(len(prompts), self._peer(prompts))
        except Exception as e:
            self._peer, self._without_peer = None, f"{type(e).__name__}: {e}"[:200]
        free_dropped_memory()  # outside of the handler, whose error still holds the peer
        return None

    def _note(self, rows: int, each: Sequence[float], reads: float, theirs: Timeline | None) -> None:
        """Keep the engine's rates before and after mlx-lm ran. They differ if the machine had other work."""
        at, ours = f"{rows}x{self._context}", statistics.mean(each)
        self._figures |= {f"{at}_tokens_s": " and ".join(f"{rate:.1f}" for rate in each)}
        self._figures |= {f"{at}_prompt_tokens_s": round(reads)}
        said = f"{rows} x {self._context:,}: {ours:,.1f} tokens/s"
        if theirs is not None:
            rate = _rate(theirs, rows)
            read = theirs.prefill(rows * self._context)["prefill_tokens_per_s"]
            self._figures |= {f"{at}_mlx_lm_tokens_s": round(rate, 1), f"{at}_mlx_lm_prompt_tokens_s": round(read)}
            said += f", mlx-lm {rate:,.1f} ({ours / rate:.2f})"
        self._said.append(said)

    def outcome(self) -> Outcome:
        """Return what was measured, and what was left out and why."""
        notes = [f"left out: {each}" for each in self._left_out]
        notes += [f"without mlx-lm: {self._without_peer}"] * bool(self._without_peer)
        return Outcome("; ".join([*self._said, *notes]), self._figures)


def _rate(timeline: Timeline, rows: int) -> float:
    """Return the tokens per second of steps in which all rows decode, from the median time between two such steps.

    The median is not affected by the few steps that compile something.
    """
    full = [when for when, drawn in timeline.steps if len(drawn) == rows]
    return rows / statistics.median(after - before for before, after in pairwise(full))
