"""Measure what structured output costs: the same rows with and without a grammar, alone and beside each other, in turn.

    python benchmarks/structured.py --json-out benchmarks/results/structured.json
    python benchmarks/structured.py --shape qwen3-8b --rows 16,64 --json-out benchmarks/results/structured-8b.json

The engine's loop runs in this process, without HTTP. Every stream gets the same number of tokens. The grammar is a
schema of objects in a list that does not end before. Four loads take turns in each round:

- `free`: so many streams without a grammar;
- `constrained`: as many with one;
- `undisturbed`: twice as many without; the rate is that of one half;
- `beside`: one half without and the other with a grammar; the rate is that of the half without.

`constrained_ratio` is constrained / free, and `beside_ratio` beside / undisturbed: medians over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem import demo
from mlx_tandem.cli.bench.script import Script, Work, run_script
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.outputs import argument
from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.generation.grammar.constraint import Constraint, Schema
from mlx_tandem.generation.grammar.lark import grammar_of
from mlx_tandem.strict_json import dumps
from mlx_tandem.types import EngineInfo, Grammar, Request, SamplingParams

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 20},
            "kind": {"enum": ["red", "green", "blue"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99999},
            "parts": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "maxItems": 3},
        },
        "required": ["name", "kind", "count", "parts"],
        "additionalProperties": False,
    },
}
LOADS = ("free", "constrained", "undisturbed", "beside")


class Bench:
    """The rounds of one run."""

    def __init__(self, args: argparse.Namespace, results: Results):
        self._args = args
        self._results = results
        self._ids = count(1)
        self._rng = random.Random(0)
        constraint = Constraint(Schema(dumps(SCHEMA)), "guided_json")
        self._grammar = Grammar(grammar_of(constraint, {}).encode(), "guided_json")

    def script(self, info: EngineInfo) -> Script:
        """Run all rounds of each number of rows."""
        found: list[dict[str, Any]] = []
        for rows in map(int, self._args.rows.split(",")):
            rates: dict[str, list[float]] = {load: [] for load in LOADS}
            for repeat in range(-1, self._args.repeats):  # the first is a warm-up
                for load in LOADS[:: -1 if repeat % 2 else 1]:
                    answers = yield Work(self._requests(info, rows, load))
                    assert answers is not None
                    rate = answers.timeline.rate(range(rows), self._args.max_tokens)
                    if repeat >= 0:
                        rates[load].append(rate)
            found.append({"rows": rows} | _summary(rates))
            self._results.add(results=found)
            print(found[-1], file=sys.stderr, flush=True)

    def _requests(self, info: EngineInfo, rows: int, load: str) -> list[m.Submit]:
        """Return the requests of one load. The first `rows` are those that are measured."""
        double = load in ("undisturbed", "beside")
        found = []
        for row in range(2 * rows if double else rows):
            constrained = load == "constrained" or (load == "beside" and row >= rows)
            prompt = tuple(self._rng.choices(range(min(info.vocab_size, 256)), k=self._args.prompt_tokens))
            params = SamplingParams(self._args.max_tokens, seed=row, ignore_eos=not constrained)
            grammar = self._grammar if constrained else None
            found.append(m.Submit(Request(next(self._ids), prompt, params, grammar=grammar)))
        return found


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return the medians of the rates and of the ratios of each round."""

    def ratio(load: str, base: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates[load], rates[base], strict=True)), 4)

    return {
        "tokens_per_s": {load: round(statistics.median(own), 1) for load, own in rates.items()},
        "constrained_ratio": ratio("constrained", "free"),
        "beside_ratio": ratio("beside", "undisturbed"),
        "rounds": {load: [round(rate, 1) for rate in own] for load, own in rates.items()},
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="rows with and without a grammar")
    parser.add_argument("--shape", help="a model of this shape with random weights; by default the demo model")
    parser.add_argument("--rows", default="16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=192)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    most = 2 * max(map(int, args.rows.split(",")))
    with tempfile.TemporaryDirectory(prefix="tandem-structured-") as scratch:
        model = ModelConfig(path=str(demo.MODEL_PATH))
        if args.shape:
            shape = SHAPES[args.shape]
            drawn = shape.dtype != "float32"
            folder = write_model(Path(scratch) / args.shape, shape, weights=not drawn)
            model = ModelConfig(path=str(folder), random_weights=drawn)
        config = EngineConfig(model=model, scheduler=SchedulerConfig(max_num_seqs=most), lora=LoraConfig(max_loras=0))
        results = Results(args.json_out, model=args.shape or "demo", max_tokens=args.max_tokens, schema=SCHEMA)
        run_script(Bench(args, results).script, config)
        results.finish()


if __name__ == "__main__":
    main()
