"""Count equal bits with `--deterministic` on this device, and time steps with and without it.

    python benchmarks/deterministic.py --shape qwen3-8b --decode 1x128,16x128,64x128 --prompts 1x1024 --json-out d.json

- equal: a few prompts are answered alone, together, in small chunks beside rows that decode, and behind a beginning
  that was read before; a trainer computes the logprobs of the answers, too. Each figure is the number of tokens, out of
  `of`, whose logprobs have other bits than those of the prompt alone;
- decode, prompts: as in decode_steps.py, without and with the option. Small models are timed in turn, in `--rounds`.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import mlx.core as mx
import msgspec
import numpy as np
from decode_steps import decode, pairs, read
from partial import Results

from mlx_tandem.adapters import formats
from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.cli.bench.shapes import SHAPES, write_adapter, write_model
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.learning import Batch, Datum, LossConfig, TrainerSpec
from mlx_tandem.engine.plan import Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import Built, build
from mlx_tandem.training.device.trainers import MLXTrainers
from mlx_tandem.types import SamplingParams, TokenLogprob

GREEDY = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
DRAWN = SamplingParams(max_tokens=1, temperature=1.0, logprobs=5, seed=7)
RANK, SCALE = 16, 2.0
SHARED = 32
"""Tokens at the beginning of a prompt that are not read again if they are known."""

CHUNK = 24
"""Tokens of a small chunk."""

Answer = list[tuple[int, TokenLogprob]]


class Texts:
    """Prompts, and their answers read in several ways by a runner."""

    def __init__(self, built: Built, adapter: AdapterWeights, lengths: Sequence[int], steps: int):
        self.built, self.steps, self.adapter = built, steps, adapter
        self.loads = True
        self.size = built.info.block_size
        rng = np.random.default_rng(3)
        self.prompts = [tuple(rng.integers(0, built.info.vocab_size, n).tolist()) for n in lengths]
        self.width = -(-(max(lengths) + steps) // self.size)

    def table(self, who: int) -> tuple[tuple[int, ...], ...]:
        """Return the blocks of a prompt."""
        return (tuple(range(1 + who * self.width, 1 + (who + 1) * self.width)),)

    def run(self, rows: Sequence[Row], seated: Sequence[int] = ()) -> list[tuple[int, TokenLogprob] | None]:
        """Run a step; return what each row has drawn."""
        seats = tuple(
            Seating(who, DRAWN if who % 2 else GREEDY, 0, len(self.prompts[who]), self.prompts[who]) for who in seated
        )
        uploads = ((1, self.adapter.info.digest),) if self.loads else ()
        self.loads = False
        plan = StepPlan(tuple(rows), seatings=seats, uploads=uploads)
        result = self.built.runner.wait(self.built.runner.launch(plan))
        logprobs = result.logprobs or [None] * len(rows)
        return [
            (tokens[0], own[0]) if tokens and own else None for tokens, own in zip(result.tokens, logprobs, strict=True)
        ]

    def row(self, who: int, start: int, tokens: tuple[int, ...], *, decodes: bool = False) -> Row:
        """Return a row of a prompt or of its answer."""
        draws = decodes or start + len(tokens) == len(self.prompts[who])
        kind = RowKind.DECODE if decodes else RowKind.PROMPT
        return Row(kind, who, who, slot(who), start, tokens, self.table(who), draws)

    def go_on(self, answers: dict[int, Answer]) -> None:
        """Decode all of these answers together to their ends."""
        while any(len(answer) < self.steps for answer in answers.values()):
            who = [w for w, answer in answers.items() if len(answer) < self.steps]
            rows = [
                self.row(w, len(self.prompts[w]) + len(answers[w]) - 1, (answers[w][-1][0],), decodes=True) for w in who
            ]
            for w, drawn in zip(who, self.run(rows), strict=True):
                assert drawn is not None
                answers[w].append(drawn)

    def alone(self) -> list[Answer]:
        """Return the answers of each prompt by itself, read in one chunk."""
        found = []
        for who, prompt in enumerate(self.prompts):
            (drawn,) = self.run([self.row(who, 0, prompt)], [who])
            assert drawn is not None
            answers = {who: [drawn]}
            self.go_on(answers)
            found.append(answers[who])
        return found

    def together(self) -> list[Answer]:
        """Return the answers of all prompts in one batch."""
        who = range(len(self.prompts))
        drawn = self.run([self.row(w, 0, self.prompts[w]) for w in who], who)
        answers = {w: [first] for w, first in zip(who, drawn, strict=True) if first is not None}
        self.go_on(answers)
        return [answers[w] for w in who]

    def chunked(self, first: int = 0) -> list[Answer]:
        """Return the answers of prompts that are read in chunks, each chunk beside all rows that decode by then.

        first: number of tokens at the beginning of each prompt that are not read again.
        """
        answers: dict[int, Answer] = {}
        for who, prompt in enumerate(self.prompts):
            seated = [who]
            for start in range(min(first, len(prompt) - 1) // self.size * self.size, len(prompt), CHUNK):
                open_ones = [w for w, answer in answers.items() if len(answer) < self.steps]
                rows = [self.row(who, start, prompt[start : start + CHUNK])]
                rows += [
                    self.row(w, len(self.prompts[w]) + len(answers[w]) - 1, (answers[w][-1][0],), decodes=True)
                    for w in open_ones
                ]
                drawn = self.run(rows, seated)
                seated = []
                if drawn[0] is not None:
                    answers[who] = [drawn[0]]
                for w, token in zip(open_ones, drawn[1:], strict=True):
                    assert token is not None
                    answers[w].append(token)
        self.go_on(answers)
        return [answers[w] for w in range(len(self.prompts))]

    def learned(self, answers: Sequence[Answer]) -> list[Answer]:
        """Return the logprobs that a trainer computes for the tokens that the prompts' rows have drawn."""
        built = self.built
        trainers = MLXTrainers(
            built.twin,
            built.adapter_dtype,
            vocab_size=built.info.vocab_size,
            micro_batch_tokens=1024,
            most_tokens=built.info.max_model_len,
            exact=built.deterministic,
        )
        trainers.open(TrainerSpec("base", 8, 8.0), "", None)
        trainers.open(TrainerSpec("adapter", RANK, SCALE * RANK), "", self.adapter)
        drawn = [[token for token, _ in answer] for answer in answers]
        data = [
            Datum((*prompt, *own), len(prompt), (1.0,) * len(own), (0.0,) * len(own))
            for prompt, own in zip(self.prompts, drawn, strict=True)
        ]
        batches = [
            Batch(name, tuple(d for who, d in enumerate(data) if slot(who) == at), LossConfig("importance_sampling"))
            for at, name in enumerate(("base", "adapter"))
        ]
        slices = trainers.run(batches, True, 1024)
        while True:
            try:
                next(slices)()
            except StopIteration as end:
                results = end.value
                break
        logprobs = [list(zip(each.model_logprobs, each.logprobs, strict=True)) for each in results]
        found: list[Answer] = []
        for who, own in enumerate(drawn):
            both = logprobs[slot(who)].pop(0)
            found.append(
                [(token, TokenLogprob(*pair)) for token, pair in zip(own, zip(*both, strict=True), strict=True)]
            )
        return found


def slot(who: int) -> int:
    """Return the adapter's slot of a prompt: two of four have it."""
    return who // 2 % 2


def differing(one: Sequence[Answer], other: Sequence[Answer]) -> int:
    """Return the number of tokens at which the two differ, in the token or in a bit of a logprob."""
    return sum(a != b for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True))


def unlike(one: Sequence[Answer], learned: Sequence[Answer]) -> int:
    """Return how many of the logprobs that a trainer computed differ in a bit from those of the answers."""
    count = 0
    for who, (left, right) in enumerate(zip(one, learned, strict=True)):
        for (_, a), (_, b) in zip(left, right, strict=True):
            drawn = who % 2 and np.float32(a.sampled) != np.float32(b.sampled)  # a greedy draw is certain
            count += bool(np.float32(a.model) != np.float32(b.model) or drawn)
    return count


def check(built: Built, adapter: AdapterWeights, lengths: Sequence[int], steps: int) -> dict[str, int]:
    """Return the number of tokens that differ in each way from those of the prompts alone."""
    texts = Texts(built, adapter, lengths, steps)
    alone = texts.alone()
    found = {
        "of": sum(map(len, alone)),
        "again": differing(alone, texts.alone()),
        "together": differing(alone, texts.together()),
        "chunked": differing(alone, texts.chunked()),
        "cached": differing(alone, texts.chunked(first=SHARED)),
        "trainer": unlike(alone, texts.learned(alone)),
    }
    built.runner.reset()
    return found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.13m")
    parser.add_argument("--decode", type=pairs, default="1x128,16x128")
    parser.add_argument("--prompts", type=pairs, default="1x512")
    parser.add_argument(
        "--lengths", default="5,40,33,100,17,64,128,250", help="tokens of the prompts that are compared"
    )
    parser.add_argument("--answers", type=int, default=12, help="tokens of their answers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--modes", default="default,deterministic", help="one of them or both")
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    drawn = shape.dtype != "float32"
    lengths = [int(n) for n in options.lengths.split(",")]
    weights: dict[str, AdapterWeights] = {}
    results = Results(options.json_out, shape=options.shape, device=backend.current().describe())
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder = write_model(Path(scratch) / "model", shape, positions=8192, weights=not drawn)
        config = EngineConfig(
            ModelConfig(path=str(folder), random_weights=drawn),
            cache=CacheConfig(num_blocks=4096),
            scheduler=SchedulerConfig(max_num_seqs=64),
            lora=LoraConfig(max_loras=1, max_lora_rank=RANK),
        )
        adapter = write_adapter(Path(scratch) / "adapter", shape, rank=RANK, scale=SCALE)
        times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
        for _ in range(options.rounds):
            for exact in (name == "deterministic" for name in options.modes.split(",")):
                built: Any = build(msgspec.structs.replace(config, deterministic=exact), weights, lambda *_: None)
                own = formats.read(adapter, built.linears, max_rank=RANK, base_layers=built.layers)
                weights[own.info.digest] = own
                mode = "deterministic" if exact else "default"
                if mode not in results.found:
                    results.add(**{mode: _checks(built, own, lengths, options)})
                for rows, context in options.decode:
                    took = decode(built, rows, context, options.steps)["p50_ms"]
                    times[exact].setdefault(f"decode {rows}x{context}", []).append(took)
                for rows, length in options.prompts:
                    took = read(built, rows, length, 3)["ms"]
                    times[exact].setdefault(f"prompt {rows}x{length}", []).append(took)
                del built
                gc.collect()
                mx.clear_cache()
    results.finish(times=_summary(times))


def _summary(times: dict[bool, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return the medians of each step in milliseconds, and how many times as long it takes with the option."""
    summary: dict[str, dict[str, float]] = {}
    for exact, own in times.items():
        for name, each in own.items():
            found = summary.setdefault(name, {})
            found["deterministic_ms" if exact else "default_ms"] = statistics.median(each)
            if len(found) == 2:
                found["ratio"] = round(found["deterministic_ms"] / found["default_ms"], 2)
    for name, found in summary.items():
        print(name, found, flush=True)
    return summary


def _checks(
    built: Built, adapter: AdapterWeights, lengths: Sequence[int], options: argparse.Namespace
) -> dict[str, Any]:
    found = {"equal": check(built, adapter, lengths, options.answers)}
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
