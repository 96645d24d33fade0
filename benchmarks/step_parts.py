"""Measure where the time of a decode step goes on this device.

    python benchmarks/step_parts.py --shape qwen3-8b --batch 1,16,64 --context 128 --json-out parts.json

Greedy steps of the engine's runner, each launched while the one before it runs, without the scheduler. Parts are
found by leaving something out or by timing it alone, so that they are the same for every back end:

- linears: all of them, including the head, one after the other in one graph;
- context: steps at this context over steps at the shortest one, which is the cost of reading keys and values;
- sampling: steps over steps that sample no token;
- the rest: norms, rotary positions, activations, writing keys and values, attention's fixed cost, gaps between kernels.

`host_ms` is the time that the host needs to launch a step. It is hidden as long as it is less than the step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from mlx_tandem.cli.bench.floor import Floor
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import POSITIONS, SHAPES, write_model
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.config import CacheConfig, EngineConfig, LoraConfig, ModelConfig, SchedulerConfig
from mlx_tandem.engine.plan import CARRY, Row, RowKind, Seating, StepPlan
from mlx_tandem.model.build import Built, build
from mlx_tandem.model.ops.products.measure import Meter, kinds, pass_seconds
from mlx_tandem.types import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def steps_ms(built: Built, rows: int, context: int, steps: int, *, draw: bool = True) -> tuple[float, float]:
    """Return the milliseconds from one step to the next, and those that the host takes to launch one.

    The first steps, which are compiled, are left out.
    """
    bs, warm = built.info.block_size, 4
    width = -(-(context + steps + warm + 1) // bs)
    if rows * width >= built.info.num_blocks:
        raise SystemExit(f"the pool has {built.info.num_blocks} blocks; {rows} rows need {rows * width}")
    tables = [tuple(range(1 + row * width, 1 + (row + 1) * width)) for row in range(rows)]
    seatings = tuple(Seating(seat, GREEDY, 0, 1, (0,)) for seat in range(rows))
    host = 0.0
    flight, began = None, 0.0
    for n in range(warm + steps):
        if n == warm:
            assert flight is not None
            built.runner.wait(flight)
            flight, began = None, perf_counter()
        token = (CARRY,) if draw and n else (0,)
        plan = StepPlan(
            tuple(Row(RowKind.DECODE, r, r, 0, context + n, token, (tables[r],), draw) for r in range(rows)),
            seatings=() if n else seatings,
        )
        launched = perf_counter()
        following = built.runner.launch(plan)
        if n >= warm:
            host += perf_counter() - launched
        if flight is not None:
            built.runner.wait(flight)
        flight = following
    assert flight is not None
    built.runner.wait(flight)
    return (perf_counter() - began) * 1e3 / steps, host * 1e3 / steps


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-bits", type=int, choices=(4, 8, 16), default=16)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    batches = [int(n) for n in args.batch.split(",")]
    shape = SHAPES[args.shape]
    drawn = shape.dtype != "float32"
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        positions = max(POSITIONS, args.context + args.steps + 64)
        folder = write_model(Path(scratch) / args.shape, shape, positions=positions, weights=not drawn)
        config = EngineConfig(
            ModelConfig(path=str(folder), random_weights=drawn),
            CacheConfig(kv_bits=args.kv_bits),
            scheduler=SchedulerConfig(max_num_seqs=max(batches)),
            lora=LoraConfig(max_loras=0),
        )
        built = build(config, {}, lambda stage, fraction: None)
        floor = Floor.of(config, built.info, 16)
    results: list[dict[str, Any]] = []
    result = describe() | {
        "shape": args.shape,
        "engine": msgspec.to_builtins(built.info),
        "context": args.context,
        "steps": args.steps,
        "repeats": args.repeats,
        "results": results,
    }
    for rows in batches:
        rounds = [measure(built, rows, args.context, args.steps) for _ in range(args.repeats)]
        medians = {key: round(statistics.median(r[key] for r in rounds), 4) for key in rounds[0]}
        found = floor.of_step(rows, args.context + args.steps / 2, 0, medians["step_ms"])
        results.append({"batch": rows} | medians | {k: found[k] for k in ("floor_ms", "bandwidth_share")})
        print(json.dumps(results[-1]), flush=True)
        if args.json_out:
            write_json(args.json_out, result)


def measure(built: Built, rows: int, context: int, steps: int) -> dict[str, float]:
    """Return the parts of a step in one round."""
    step, host = steps_ms(built, rows, context, steps)
    short, _ = steps_ms(built, rows, 1, min(steps, built.info.block_size))
    silent, _ = steps_ms(built, rows, context, steps, draw=False)
    linears = pass_seconds(kinds(built.twin), built.adapter_dtype, rows, Meter()) * 1e3
    reading, sampling = max(step - short, 0.0), max(step - silent, 0.0)
    return {
        "step_ms": step,
        "host_ms": host,
        "linears_ms": linears,
        "context_ms": reading,
        "sampling_ms": sampling,
        "rest_ms": max(step - linears - reading - sampling, 0.0),
    }


if __name__ == "__main__":
    main()
