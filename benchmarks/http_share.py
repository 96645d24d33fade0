"""Measure the share of the engine's own rate that is left through HTTP.

    python benchmarks/http_share.py --json-out benchmarks/results/http_share.json
    python benchmarks/http_share.py --shape qwen3-8b --dtype bfloat16

One closed loop runs in turn through a real server, with its front, tokenizer and event streams, and in an engine
with the same settings without any of them (`tandem bench engine --num-requests`), whose prompts have as many tokens
as the server counted. Both hold the model, and each rests while the other is measured. Their first rounds, in which
steps are compiled, are not counted. The ratio is the median over neighbouring rounds; every round is in the file
when it ends.

Beside the engine's loop are the steps of a batch whose rows start together, which no server can know beforehand.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

import yaml
from partial import Results, stop_cleanly
from rich.table import Table
from servers import tandem

from mlx_tandem.cli.bench.client import BenchError
from mlx_tandem.cli.bench.engine import Batch, EngineBench, EngineLoad
from mlx_tandem.cli.bench.serve import measure
from mlx_tandem.cli.bench.shapes import POSITIONS, SHAPES, write_model
from mlx_tandem.cli.bench.stats import median
from mlx_tandem.cli.bench.workloads import Load, Sampling
from mlx_tandem.cli.console import fail, show
from mlx_tandem.cli.outputs import argument
from mlx_tandem.cli.settings import build
from mlx_tandem.errors import TandemError
from mlx_tandem.http_client import HttpError

BLOCK = 16
ROOM = 4
"""Size of each pool as a multiple of the blocks that all streams fill at once; both pools have to fit on one device."""
LEAST = 64
"""Fewest blocks of a pool: the client first counts the tokens of a prompt of 128 words."""


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the rate through HTTP beside the engine's own")
    parser.add_argument("--shape", choices=SHAPES, default="4m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--num-requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sampling", choices=get_args(Sampling), default="greedy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--start-seconds", type=float, default=300.0, help="that the server may take to start")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, options={name: v for name, v in vars(args).items() if name != "json_out"})
    with tempfile.TemporaryDirectory(prefix="tandem-share-") as scratch:
        shape, length = SHAPES[args.shape], args.prompt_tokens + args.max_tokens
        drawn = shape.dtype != "float32"
        blocks = max(LEAST, ROOM * args.streams * (length // BLOCK + 1)) + 1
        model = write_model(Path(scratch) / args.shape, shape, positions=max(POSITIONS, 2 * length), weights=not drawn)
        settings = Path(scratch) / "both.yaml"
        tree = {
            "model": {"path": str(model), "dtype": args.dtype, "random_weights": drawn},
            "cache": {"block_size": BLOCK, "num_blocks": blocks},
            "scheduler": {"max_num_seqs": args.streams},
            "lora": {"max_loras": 0},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings)).started(model, args.start_seconds) as server:
            results.add(device=server.device())
            _say(f"served at {server.url} after {server.start_s:.1f} s")
            try:
                Comparison(server.url, settings, args, results).measure()
            except (BenchError, HttpError, TandemError) as e:
                fail(str(e))
    results.finish()
    report(results.found)


class Comparison:
    """All rounds of both ways."""

    def __init__(self, url: str, settings: Path, args: argparse.Namespace, results: Results):
        self._settings = settings
        self._args = args
        self._results = results
        self._engine: dict[str, Any] = {}
        self._http: list[dict[str, Any]] = []
        self._load = Load(
            url,
            concurrency=(args.streams,),
            num_requests=args.num_requests,
            prompt_tokens=args.prompt_tokens,
            max_tokens=args.max_tokens,
            sampling=args.sampling,
            repeats=1,
        )

    def measure(self) -> None:
        """Run all rounds."""
        args = self._args
        load = EngineLoad(
            (Batch(args.streams, round(self._through_http()["prompt_tokens"])),),
            max_tokens=args.max_tokens,
            num_requests=args.num_requests,
            repeats=args.repeats,
            sampling=args.sampling,
            peer=False,
        )
        EngineBench(build(self._settings, {}).engine, load, [], self._keep, self._before_round).measure()

    def _before_round(self, repeat: int) -> None:
        if repeat >= 0:
            self._http.append(self._through_http())
            self._results.add(http={"median": median(self._http), "rounds": self._http})

    def _through_http(self) -> dict[str, Any]:
        found: dict[str, Any] = measure(self._load)["results"][0]["rounds"][0]
        if found["errors"] or found["refused"]:
            fail(f"{found['errors']} requests failed ({found['first_error']}), {found['refused']} were refused")
        return found

    def _keep(self, more: dict[str, Any]) -> None:
        self._engine |= more
        self._results.add(engine=self._engine)
        if not self._engine["results"]:
            return
        (row,) = self._engine["results"]
        rates = [
            (a["tokens_per_s"], b["loop_tokens_per_s"])
            for a, b in zip(self._http, row["rounds"]["tandem"], strict=True)
        ]
        ratio = round(statistics.median(http / engine for http, engine in rates), 3)
        self._results.add(tokens_per_s=[{"http": http, "engine": engine} for http, engine in rates], ratio=ratio)
        _say(f"round {len(rates)}  through HTTP {rates[-1][0]:,.0f} tok/s, the engine {rates[-1][1]:,.0f}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def report(found: dict[str, Any]) -> None:
    """Show the results."""
    http, engine = found["http"]["median"], found["engine"]["results"][0]["tandem"]
    between = http["inter_token_ms"]
    rows = {
        "through HTTP": (http["tokens_per_s"], between["p50"], between["p99"]),
        "the engine, the same loop": tuple(
            engine[f"loop_{figure}"] for figure in ("tokens_per_s", "inter_token_p50_ms", "inter_token_p99_ms")
        ),
        "the engine, rows that start together": (engine["decode_tokens_per_s"], engine["step_ms"]),
    }
    table = Table("", "tok/s", "inter-token p50", "p99")
    for name, (rate, *times) in rows.items():
        table.add_row(name, f"{rate:,.0f}", *(f"{t:.2f} ms" for t in times))
    show(table)
    show(f"through HTTP {found['ratio']:.3f} of the engine's rate, median of {len(found['tokens_per_s'])} rounds")


if __name__ == "__main__":
    main()
