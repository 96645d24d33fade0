"""Compare training four adapters of different rank in one pass with training one adapter on all of the work.

    python benchmarks/train_together.py --json-out benchmarks/results/train_together.json

The passes are over the same examples, forward and backward with a step of the optimiser: by one adapter of rank 16;
by four of rank 4, 8, 16 and 32 with a quarter of the examples each, together; and by the four one after the other.
The three take turns; nothing is served meanwhile.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from time import perf_counter
from typing import Any

from mlx_tandem.api import Engine
from mlx_tandem.api.trainer import Trainer
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.engine.learning import Datum

RANKS = (4, 8, 16, 32)
ALONE = 16
RATE = 1e-6
WAYS = ("alone", "together", "one by one")


def examples(count: int) -> list[Datum]:
    """Return short completions of uneven length, as a small model's are."""
    rng = random.Random(0)
    found = []
    for _ in range(count):
        prompt, completion = rng.randint(8, 20), rng.randint(12, 32)
        tokens = tuple(rng.randint(300, 900) for _ in range(prompt + completion))
        found.append(Datum(tokens, prompt, (1.0,) * completion))
    return found


def seconds(engine: Engine, passes: list[dict[Trainer, Any]]) -> float:
    """Return the seconds of these passes."""
    began = perf_counter()
    for work in passes:
        engine.forward_backward(work, "cross_entropy")
        for trainer in work:
            trainer.step(RATE)
    return perf_counter() - began


def measure(engine: Engine, count: int, repeats: int) -> dict[str, Any]:
    """Run all rounds and return their figures."""
    trainers = [engine.trainer(f"rank-{rank}", rank=rank) for rank in RANKS]
    one = trainers[RANKS.index(ALONE)]
    data = examples(count)
    parts = {t: data[i :: len(trainers)] for i, t in enumerate(trainers)}
    ways: dict[str, list[dict[Trainer, Any]]] = {
        "alone": [{one: data}],
        "together": [parts],
        "one by one": [{t: part} for t, part in parts.items()],
    }
    tokens = sum(len(d.tokens) for d in data)
    rounds: list[dict[str, float]] = []
    for repeat in range(-1, repeats):
        order = WAYS[repeat % 3 :] + WAYS[: repeat % 3]
        took = {way: tokens / seconds(engine, ways[way]) for way in order}
        if repeat >= 0:
            rounds.append({way: round(took[way], 1) for way in WAYS})
            print(rounds[-1], file=sys.stderr, flush=True)
    ratio = {way: round(statistics.median(r[way] / r["alone"] for r in rounds), 3) for way in WAYS}
    return {"ranks": RANKS, "tokens": tokens, "tokens_per_s": rounds, "of_alone": ratio}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="four adapters trained at once")
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--micro-batch-tokens", type=int, default=0)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with Engine(micro_batch_tokens=args.micro_batch_tokens) as engine:
        result = measure(engine, args.examples, args.repeats)
    if args.json_out:
        write_json(args.json_out, describe() | result)
    print(f"of one adapter on all of the work: {result['of_alone']}")


if __name__ == "__main__":
    main()
