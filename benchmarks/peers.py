"""Compare the servers that MLX users have: same folder, same client, same BLAS, taking turns.

    python benchmarks/peers.py --vllm-mlx /path/to/its/venv/bin/vllm-mlx --json-out benchmarks/results/peers.json
    python benchmarks/peers.py --real 4bit --concurrency 1,8 --json-out benchmarks/results/peers-135m-4bit.json

They are compared by events per second, one token per event, with mixed sampling and no seed (mlx_lm.server does not
batch requests that have one). Without --vllm-mlx that peer is left out. The models have random weights in some shapes;
with --real the model is the one that `scripts/real_model.py` makes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from real import FORMS, write_real
from rich.table import Table
from servers import in_turn, mlx_lm_server, tandem, vllm_mlx

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.stats import median
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument, write_json


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="tandem beside mlx_lm.server and vllm-mlx")
    parser.add_argument("--shapes", default="0.13m,4m")
    parser.add_argument("--real", choices=FORMS, help="a real model of 135M parameters instead (scripts/real_model.py)")
    parser.add_argument("--concurrency", default="1,2,4,8,32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--requests", type=int, help="requests of a round; by default 24, or 4 for each that is under way"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--vllm-mlx", type=Path, help="the executable in its own environment")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    servers = [tandem(), mlx_lm_server()]
    if args.vllm_mlx:
        servers.append(vllm_mlx(args.vllm_mlx))
    shapes: dict[str, Any] = {}
    for shape in [args.real] if args.real else args.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="tandem-peers-") as scratch:
            folder = Path(scratch) / shape
            model = write_real(folder, shape) if args.real else write_model(folder, SHAPES[shape])
            load = Load(
                url="",
                concurrency=tuple(int(c) for c in args.concurrency.split(",")),
                num_requests=args.requests,
                max_tokens=args.max_tokens,
                prompt_tokens=args.prompt_tokens,
                model=str(model),
                seeded=False,
            )
            shapes[shape] = summary(in_turn(servers, model, load, args.repeats))
    result = describe() | {
        "prompt_tokens": args.prompt_tokens,
        "max_tokens": args.max_tokens,
        "repeats": args.repeats,
        "requests": args.requests,
        "shapes": shapes,
    }
    if args.json_out:
        write_json(args.json_out, result)
    for shape, content in shapes.items():
        show(table(shape, content))


def summary(rounds: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the medians per server and concurrency, and tandem's events per second over each peer's, round against
    round.
    """
    results, ratios = [], []
    levels = sorted({r["concurrency"] for r in rounds["tandem"]})
    for level in levels:
        at = {name: [r for r in raw if r["concurrency"] == level] for name, raw in rounds.items()}
        results += [{"concurrency": level, "server": name, "median": median(raw)} for name, raw in at.items()]
        ours = at.pop("tandem")
        ratios.append(
            {"concurrency": level}
            | {
                f"tandem/{name}": round(
                    statistics.median(
                        a["events_per_s"] / b["events_per_s"]
                        for a, b in zip(ours, raw, strict=True)
                        if b["events_per_s"]
                    ),
                    3,
                )
                for name, raw in at.items()
            }
        )
    return {"results": results, "ratios": ratios, "rounds": rounds}


def table(shape: str, content: dict[str, Any]) -> Table:
    """Return a table of the results."""
    names = list(content["rounds"])
    found = Table(title=f"{shape}: events per second", title_style="")
    found.add_column("at once", justify="right")
    for name in names:
        found.add_column(name, justify="right")
    for name in names[1:]:
        found.add_column(f"tandem / {name}", justify="right")
    for row in content["ratios"]:
        level = row["concurrency"]
        medians = {r["server"]: r["median"] for r in content["results"] if r["concurrency"] == level}
        found.add_row(
            str(level),
            *(f"{medians[name]['events_per_s']:,.0f}" for name in names),
            *(f"{row[f'tandem/{name}']:.2f}" for name in names[1:]),
        )
    return found


if __name__ == "__main__":
    main()
