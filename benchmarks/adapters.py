"""Measure the cost of adapters: 8 of them on a random model, with base rows, one adapter's rows and several mixes in
turn.

python benchmarks/adapters.py --shape 4m --json-out benchmarks/results/adapters-4m.json
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from servers import tandem

from mlx_tandem.cli.bench.report import serve_table
from mlx_tandem.cli.bench.serve import measure
from mlx_tandem.cli.bench.shapes import SHAPES, write_adapter, write_model
from mlx_tandem.cli.bench.workloads import Load, with_baselines
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument, write_json


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="base rows, one adapter's and mixes through one server")
    parser.add_argument("--shape", default="4m")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--mode", default="base,mixed,skew,long-decode-mixed", help="as of tandem bench serve")
    parser.add_argument("--concurrency", default="1,16,64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    with tempfile.TemporaryDirectory(prefix="tandem-adapters-") as scratch:
        model = write_model(Path(scratch) / args.shape, shape)
        options: list[str] = []
        for i in range(args.adapters):
            folder = write_adapter(Path(scratch) / f"a{i}", shape, rank=args.rank, seed=i + 1)
            options += ["--adapter", f"a{i}", str(folder)]
        with tandem(*options).running(model) as url:
            result = measure(
                Load(
                    url=url,
                    modes=with_baselines(args.mode.split(",")),
                    concurrency=tuple(int(c) for c in args.concurrency.split(",")),
                    max_tokens=args.max_tokens,
                    repeats=args.repeats,
                ),
                progress=lambda line: print(line, file=sys.stderr, flush=True),
            )
    result |= {"shape": args.shape, "rank": args.rank}
    if args.json_out:
        write_json(args.json_out, result)
    show(serve_table(result))


if __name__ == "__main__":
    main()
