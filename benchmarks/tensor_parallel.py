"""Measure several ranks that compute one model beside one rank, in turn on one machine.

    python benchmarks/tensor_parallel.py --shape 0.13m --size 2 --backend ring --batch 1,8 --prompt-tokens 64
    python benchmarks/tensor_parallel.py --shape qwen3-8b --size 2 --backend nccl --json-out tensor_parallel-8b.json

Each side is `tandem bench engine` in a process of its own, which with several ranks starts the others. For each number
of rows it decodes with the base, one adapter for all rows, and eight in turn. A long prompt is read by itself.
`ratio` is the time of a decode step of the ranks over that of one rank, smaller than 1 where the ranks are faster;
`prefill_ratio` is the speed of reading the long prompt over that of one rank. `weights` are the bytes of weights on
each device. A shape that one device cannot hold, such as 70b, is measured with `--only ranks`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly

ONE, RANKS = "one", "ranks"


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4m")
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0: its own")
    parser.add_argument("--size", type=int, default=2, help="number of ranks")
    parser.add_argument("--backend", choices=["ring", "nccl"], default="ring")
    parser.add_argument("--batch", default="1,16,64")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--long-prompt", type=int, default=8192, help="tokens of a prompt that is read alone; 0: none")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=[ONE, RANKS], help="measure one side alone")
    parser.add_argument("--json-out", type=Path)
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(args, args.child[0], Path(args.child[1]))
        return
    stop_cleanly()
    results = Results(args.json_out, shape=args.shape, size=args.size, backend=args.backend)
    results.add()  # now, so that a file that cannot be written is reported before anything is measured
    with tempfile.TemporaryDirectory(prefix="tandem-ranks-") as scratch:
        folder = Path(scratch)
        make(args, folder)
        sides: dict[str, Any] = {}
        for side in [args.only] if args.only else [ONE, RANKS]:
            sides[side] = child(args, side, folder)
            results.add(**{side: sides[side]})
    rows = compared(sides) if len(sides) == 2 else []
    results.finish(compared=rows)
    for row in rows:
        print(json.dumps(row), flush=True)


def make(args: argparse.Namespace, folder: Path) -> None:
    """Write the model and the adapters."""
    from dataclasses import replace

    from mlx_tandem.cli.bench.engine import RANK
    from mlx_tandem.cli.bench.shapes import SHAPES, Shape, write_adapter, write_model

    large = {"70b": Shape(8192, 80, 64, 8, 128, 28_672, 128_256, tied=False, dtype="bfloat16")}
    shape = (SHAPES | large)[args.shape]
    if args.layers:
        shape = replace(shape, layers=args.layers)
    positions = max(args.prompt_tokens, args.long_prompt) + args.max_tokens
    write_model(folder / "model", shape, positions=positions, weights=shape.dtype == "float32")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda i: write_adapter(folder / f"a{i}", shape, rank=RANK, seed=i), range(args.adapters)))


def child(args: argparse.Namespace, side: str, folder: Path) -> dict[str, Any]:
    """Measure one side in a process of its own, and return what it says."""
    words = [sys.executable, __file__, *sys.argv[1:], "--child", side, str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the side '{side}' ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(args: argparse.Namespace, side: str, folder: Path) -> None:
    """Measure one side with the package that this process imports, and print the results as one line of JSON."""
    # MLX must not be loaded here before the engine has set the variables of this rank.
    from mlx_tandem.cli.bench.engine import Batch, EngineBench, EngineLoad
    from mlx_tandem.config import EngineConfig, LoraConfig, ModelConfig, ParallelConfig, SchedulerConfig

    several = side == RANKS
    found: dict[str, Any] = {}
    batches = tuple(Batch(int(rows), args.prompt_tokens) for rows in args.batch.split(","))
    if args.long_prompt:
        batches += (Batch(1, args.long_prompt),)
    config = EngineConfig(
        model=ModelConfig(path=str(folder / "model"), random_weights=not (folder / "model/model.safetensors").exists()),
        scheduler=SchedulerConfig(max_num_seqs=max(batch.rows for batch in batches)),
        lora=LoraConfig(max_loras=args.adapters, max_cpu_lora_gb=64.0, prepare=args.adapters > 0),
        parallel=ParallelConfig(ranks=args.size, mode=args.backend) if several else ParallelConfig(),
    )
    load = EngineLoad(
        batches, args.max_tokens, repeats=args.repeats, sampling="greedy", adapters=args.adapters, peer=False
    )
    EngineBench(config, load, [folder / f"a{i}" for i in range(args.adapters)], found.update).measure()
    engine = found["engine"]
    print(
        json.dumps(
            {
                "device": engine["device"],
                "dtype": engine["dtype"],
                "weights": engine["memory"]["weights"],
                "attention": engine["attention_backend"],
                "adapters": engine["lora_backend"],
                "load_seconds": engine["load_seconds"],
                "results": found["results"],
            }
        ),
        flush=True,
    )


def compared(sides: dict[str, Any]) -> list[dict[str, Any]]:
    """Return for each batch and kind of rows the ratios of both sides."""
    rows = []
    share = round(sides[RANKS]["weights"] / sides[ONE]["weights"], 3)
    for one, ranks in zip(sides[ONE]["results"], sides[RANKS]["results"], strict=True):
        for kind in one["rounds"]:
            decode, prefill = (
                [statistics.median(figures[field] for figures in side["rounds"][kind]) for side in (one, ranks)]
                for field in ("decode_tokens_per_s", "prefill_tokens_per_s")
            )
            rows.append(
                {
                    "batch": one["batch"],
                    "prompt_tokens": one["prompt_tokens"],
                    "kind": kind,
                    "decode_tokens_per_s": [round(speed, 1) for speed in decode],
                    "ratio": round(decode[0] / decode[1], 3),
                    "prefill_ratio": round(prefill[1] / prefill[0], 3),
                    "weights_share": share,
                }
            )
    return rows


if __name__ == "__main__":
    main()
