"""Measure what the prefix cache is worth to learning from groups of rollouts of one prompt, with and without it.

    python benchmarks/groups.py --json-out benchmarks/results/groups.json

A round is one update: rollouts of a few prompts, sixteen requests for each, sampled from the newest version; a pass
over them, a step, and the next version. Two engines with the built-in model take turns, one of which has no prefix
cache; both get the same prompts. The time of learning itself is the same for both and is included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from itertools import chain, repeat
from time import perf_counter
from typing import Any

from partial import Results, stop_cleanly
from rich.table import Table

from mlx_tandem import demo
from mlx_tandem.api import Engine
from mlx_tandem.api.trainer import Trainer
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument
from mlx_tandem.engine.learning import Datum

RATE = 1e-5
WITHOUT, WITH = "without", "with"


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="what the prefix cache is worth to learning")
    parser.add_argument("--lengths", default="256,512", help="tokens of a prompt")
    parser.add_argument("--prompts", type=int, default=2, help="of an update")
    parser.add_argument("--rollouts", type=int, default=16, help="of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of a rollout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, prompts=args.prompts, rollouts=args.rollouts, completion_tokens=args.max_tokens)
    with Engine(demo.MODEL_PATH, {}, prefix_caching=False) as without, Engine(demo.MODEL_PATH, {}) as engine:
        sides = {WITHOUT: Side(without, args), WITH: Side(engine, args)}
        measured: list[dict[str, Any]] = []
        for length in map(int, args.lengths.split(",")):
            measured.append(in_turn(sides, length, args.repeats))
            results.add(lengths=measured)
    results.finish()
    report(results.found)


class Side:
    """One engine with the adapter that it trains."""

    def __init__(self, engine: Engine, args: argparse.Namespace):
        self._engine = engine
        self._args = args
        self._trainer: Trainer = engine.trainer("policy", rank=8)
        self._trainer.publish()

    def update(self, length: int, seed: int) -> dict[str, float]:
        """Run one update; return the milliseconds of its parts, and how many prompt tokens the rollouts computed."""
        args, rng = self._args, random.Random(seed)
        prompts = [[rng.randrange(20, 900) for _ in range(length)] for _ in range(args.prompts)]
        asked = list(chain.from_iterable(repeat(p, args.rollouts) for p in prompts))
        options: dict[str, Any] = {"max_tokens": args.max_tokens, "ignore_eos": True, "temperature": 1.0}
        began = perf_counter()
        done = self._engine.generate(asked, adapter="policy", logprobs=0, seed=seed, **options)
        drawn = perf_counter()
        data = []
        for i, (prompt, completion) in enumerate(zip(asked, done, strict=True)):
            weights = (1.0 if i % 2 else -1.0,) * len(completion.token_ids)
            logprobs = tuple(lp.sampled for lp in completion.logprobs or ())
            data.append(Datum((*prompt, *completion.token_ids), length, weights, logprobs))
        self._trainer.forward_backward(data, "importance_sampling")
        self._trainer.step(RATE, grad_norm=1.0)
        self._trainer.publish()
        ended = perf_counter()
        return {
            "rollouts_ms": round((drawn - began) * 1e3, 1),
            "learning_ms": round((ended - drawn) * 1e3, 1),
            "computed_prompt_tokens": sum(d.prompt_tokens - d.cached_tokens for d in done),
        }


def in_turn(sides: dict[str, Side], length: int, repeats: int) -> dict[str, Any]:
    """Run an update of each side in each round; the first two rounds compile and are not counted."""
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(-2, repeats):
        order = list(sides)[:: -1 if number % 2 else 1]
        row = {name: sides[name].update(length, seed=1000 * length + number) for name in order}
        print(f"{length} tokens  {row}", file=sys.stderr, flush=True)
        if number >= 0:
            rounds.append(row)
    return {"prompt_tokens": length} | figures(rounds) | {"rounds": rounds}


def figures(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians. The time of learning is the same on both sides, so its median is over the rounds of both."""
    sides: dict[str, dict[str, float]] = {
        name: {
            key: statistics.median(r[name][key] for r in rounds) for key in ("rollouts_ms", "computed_prompt_tokens")
        }
        for name in (WITHOUT, WITH)
    }
    learning = statistics.median(r[name]["learning_ms"] for r in rounds for name in sides)
    for side in sides.values():
        side["updates_per_minute"] = round(60e3 / (side["rollouts_ms"] + learning), 3)
    return {
        "learning_ms": learning,
        "medians": sides,
        "times": {
            "computed_prompt_tokens": round(
                sides[WITHOUT]["computed_prompt_tokens"] / sides[WITH]["computed_prompt_tokens"], 2
            ),
            "rollouts_ms": round(
                statistics.median(r[WITHOUT]["rollouts_ms"] / r[WITH]["rollouts_ms"] for r in rounds), 2
            ),
            "updates_per_minute": round(sides[WITH]["updates_per_minute"] / sides[WITHOUT]["updates_per_minute"], 2),
        },
    }


def report(found: dict[str, Any]) -> None:
    """Show the results."""
    count = found["prompts"] * found["rollouts"]
    table = Table(title=f"updates of {count} rollouts, {found['rollouts']} a prompt", title_style="")
    for column in ("prompt", "", "without", "with", "times"):
        table.add_column(column, justify="right")
    for row in found["lengths"]:
        sides = [row["medians"][name] for name in (WITHOUT, WITH)]
        for name, key in (("prompt tokens computed", "computed_prompt_tokens"), ("rollouts, ms", "rollouts_ms")):
            table.add_row(
                f"{row['prompt_tokens']:,}", name, *(f"{s[key]:,.0f}" for s in sides), f"{row['times'][key]:.2f}"
            )
        minutes = (f"{s['updates_per_minute']:.2f}" for s in sides)
        table.add_row("", "updates a minute", *minutes, f"{row['times']['updates_per_minute']:.2f}")
    show(table)


if __name__ == "__main__":
    main()
