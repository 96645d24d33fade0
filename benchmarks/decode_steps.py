"""Milliseconds of the engine's steps by themselves, without scheduler and server, on random weights.

    python benchmarks/decode_steps.py --shape qwen3-8b --decode 1x128,64x1024 --prompts 1x8192 --json-out s.json

- decode: greedy steps of a number of rows at a context, each launched while the one before it runs. The first steps,
  which are compiled, are left out. `launch_ms` is the host's time to launch a step; where the device is slower, it
  includes waiting;
- prompts: a number of prompts of a length, read in chunks of as many tokens as the engine takes at once; each step is
  waited for.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlx_tandem.cli.outputs import argument
from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import numpy as np
from partial import Results

from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import Built, build
from mlx_tandem.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
WARM = 6


def pairs(text: str) -> list[tuple[int, int]]:
    """Return the (rows, length) pairs of a text such as `1x128,16x1024`."""
    return [(int(rows), int(length)) for rows, _, length in (part.partition("x") for part in text.split(",") if part)]


def tables(built: Built, rows: int, length: int) -> list[tuple[int, ...]]:
    """Return a table of blocks for each row."""
    width = -(-length // built.info.block_size)
    if rows * width >= built.info.num_blocks:
        raise SystemExit(f"the pool has {built.info.num_blocks} blocks; {rows} rows need {rows * width}")
    return [tuple(range(1 + row * width, 1 + (row + 1) * width)) for row in range(rows)]


def decode(built: Built, rows: int, context: int, steps: int) -> dict[str, float]:
    """Return the times of decode steps."""
    runner, bs = built.runner, built.info.block_size
    own = tables(built, rows, context + WARM + steps + 2)
    seatings = tuple(Seating(seat, GREEDY, 0, 1, (0,)) for seat in range(rows))

    def plan(n: int) -> StepPlan:
        at = context + n
        token = (CARRY,) if n else (7,)
        each = (Row(RowKind.DECODE, r, r, 0, at, token, (own[r][: at // bs + 1],), True) for r in range(rows))
        return StepPlan(tuple(each), seatings=() if n else seatings)

    for n in range(WARM):
        runner.wait(runner.launch(plan(n)))
    launches, ends = [], [time.perf_counter()]
    before = runner.launch(plan(WARM))
    for n in range(WARM + 1, WARM + 1 + steps):
        asked = plan(n)
        began = time.perf_counter()
        flight = runner.launch(asked)
        launches.append(time.perf_counter() - began)
        runner.wait(before)
        ends.append(time.perf_counter())
        before = flight
    runner.wait(before)
    times = [b - a for a, b in pairwise(ends)]
    p50 = statistics.median(times)
    return {
        "p50_ms": round(p50 * 1e3, 3),
        "mean_ms": round(statistics.mean(times) * 1e3, 3),
        "launch_ms": round(statistics.median(launches) * 1e3, 3),
        "tokens_per_s": round(rows / p50, 1),
    }


def read(built: Built, rows: int, length: int, repeats: int) -> dict[str, float]:
    """Return the time to read prompts."""
    runner, bs = built.runner, built.info.block_size
    chunk = built.info.memory.chunk_tokens
    own, rng = tables(built, rows, length), np.random.default_rng(0)
    together = max(1, chunk // length)
    took = []
    for _ in range(1 + repeats):
        total = 0.0
        for first in range(0, rows, together):
            who = range(first, min(rows, first + together))
            for start in range(0, length, chunk):
                n = min(chunk, length - start)
                end = start + n
                tokens = [tuple(rng.integers(0, built.info.vocab_size, n).tolist()) for _ in who]
                plan = StepPlan(
                    tuple(
                        Row(RowKind.PROMPT, r, r, 0, start, own_tokens, (own[r][: -(-end // bs)],), end == length)
                        for r, own_tokens in zip(who, tokens, strict=True)
                    ),
                    seatings=() if start else tuple(Seating(r, GREEDY, 0, 1, (0,)) for r in who),
                )
                began = time.perf_counter()
                runner.wait(runner.launch(plan))
                total += time.perf_counter() - began
        took.append(total * 1e3)
    return {"ms": round(statistics.median(took[1:]), 1)}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--decode", type=pairs, default="1x128,16x128,64x128")
    parser.add_argument("--prompts", type=pairs, default="")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json-out", type=argument)
    options = parser.parse_args()
    shape, wanted = SHAPES[options.shape], (options.decode, options.prompts)
    drawn = shape.dtype != "float32"
    longest = max(n for _, n in (*wanted[0], *wanted[1])) + options.steps + 64
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        folder = write_model(Path(scratch) / options.shape, shape, positions=max(8192, longest), weights=not drawn)
        config = EngineConfig(
            ModelConfig(path=str(folder), random_weights=drawn),
            scheduler=SchedulerConfig(max_num_seqs=max(rows for rows, _ in (*wanted[0], *wanted[1]))),
            lora=LoraConfig(max_loras=0),
        )
        built = build(config, {}, lambda stage, fraction: None)
    info = built.info
    results = Results(
        options.json_out, shape=options.shape, device=backend.current().describe(), attention=info.attention_backend
    )
    found: dict[str, list[dict[str, Any]]] = {"decode": [], "prompts": []}
    for kind, each in zip(found, wanted, strict=True):
        for rows, length in each:
            figures = (
                decode(built, rows, length, options.steps)
                if kind == "decode"
                else read(built, rows, length, options.repeats)
            )
            found[kind].append({"rows": rows, "length": length} | figures)
            print(kind, found[kind][-1], flush=True)
            results.add(**found)
    results.finish(**found)


if __name__ == "__main__":
    main()
