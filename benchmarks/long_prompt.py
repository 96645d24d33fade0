"""Measure whether running streams stall when a long prompt arrives.

    python benchmarks/long_prompt.py --json-out benchmarks/results/long_prompt.json

Sixteen streams decode on a tiny random model with 40k positions. Their inter-token times while a prompt of 2k or of
32k tokens is read are compared with those just before it came and just after it was done; the time to the long
prompt's own first token is reported, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.table import Table
from servers import tandem

from mlx_tandem.cli.bench.client import run_loop
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.bench.shapes import SHAPES, write_model
from mlx_tandem.cli.bench.stats import spread
from mlx_tandem.cli.bench.stream import Stream
from mlx_tandem.cli.console import show
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import Connection

POSITIONS = 40_960
STREAM_TOKENS = 3000


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="inter-token times of running streams beside a long prompt")
    parser.add_argument("--shape", default="0.13m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--lengths", default="2000,32000", help="tokens of the arriving prompts")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--window", type=float, default=2.0, help="seconds of undisturbed decoding before and after")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-long-") as scratch:
        model = write_model(Path(scratch) / args.shape, SHAPES[args.shape], positions=POSITIONS)
        with tandem("--no-enable-prefix-caching").running(model) as url:  # each long prompt is read, not found
            lengths = [int(n) for n in args.lengths.split(",")]
            results = run_loop(measure(url, args.streams, lengths, args.repeats, args.window))
    result = describe() | {"shape": args.shape, "streams": args.streams, "results": results}
    if args.json_out:
        write_json(args.json_out, result)
    table = Table(title=f"{args.shape}, {args.streams} streams, median of {args.repeats}", title_style="")
    for column in ("prompt", "p99 undisturbed", "p99 meanwhile", "ratio", "longest gap", "first token of the prompt"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(
            f"{row['prompt_tokens']:,}",
            f"{row['undisturbed_p99_ms']:.2f} ms",
            f"{row['meanwhile_p99_ms']:.2f} ms",
            f"{row['p99_ratio']:.2f}",
            f"{row['longest_gap_ms']:.1f} ms",
            f"{row['ttft_ms']:,.0f} ms",
        )
    show(table)


async def measure(url: str, streams: int, lengths: list[int], repeats: int, window: float) -> list[dict[str, Any]]:
    """Return the figures for each length."""
    finished: list[Stream] = []
    current: dict[int, Stream] = {}

    async def decode(i: int) -> None:
        connection = Connection.to(url)
        while True:
            stream = current[i] = Stream()
            body = _body(8, STREAM_TOKENS, seed=i)
            stream.finish(await connection.request("POST", "/v1/completions", body, stream))
            if stream.error:
                raise RuntimeError(f"a stream ended with {stream.error}")
            finished.append(stream)

    def gaps(start: float, end: float) -> list[float]:
        """Return the milliseconds between events of one stream that ended between two times."""
        found: list[float] = []
        for stream in [*finished, *current.values()]:
            times = stream.times
            found += [(b - a) * 1e3 for a, b in itertools.pairwise(times) if start <= b < end]
        return found

    decoding = asyncio.gather(*(decode(i) for i in range(streams)))
    connection = Connection.to(url)
    for length in lengths:  # every shape is traced once before it is timed
        await _ask(connection, length)
    await asyncio.sleep(window)
    results = []
    for length in lengths:
        rows = []
        for _ in range(repeats):
            finished.clear()
            before = perf_counter()
            await asyncio.sleep(window)
            start = perf_counter()
            long = await _ask(connection, length)
            end = perf_counter()
            await asyncio.sleep(window)
            after = perf_counter()
            calm = spread(gaps(before, start) + gaps(end, after))
            during = gaps(start, end)
            rows.append(
                {
                    "prompt_tokens": long.prompt_tokens,
                    "undisturbed_p99_ms": calm["p99"],
                    "meanwhile_p99_ms": spread(during)["p99"],
                    "p99_ratio": round(spread(during)["p99"] / calm["p99"], 3),
                    "longest_gap_ms": round(max(during), 3),
                    "ttft_ms": round(long.first * 1e3, 1),
                }
            )
            if decoding.done():
                decoding.result()
        results.append({key: statistics.median(row[key] for row in rows) for key in rows[0]} | {"rounds": rows})
    decoding.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await decoding
    return results


async def _ask(connection: Connection, length: int) -> Stream:
    stream = Stream()
    stream.finish(await connection.request("POST", "/v1/completions", _body(length, 8, seed=0), stream))
    if stream.error:
        raise RuntimeError(f"the long prompt failed: {stream.error}")
    return stream


def _body(length: int, max_tokens: int, seed: int) -> dict[str, Any]:
    """Return a request with a prompt of `length` tokens; in these shapes' tokenizer a syllable with its space is one
    token.
    """
    rng = random.Random(seed)
    words = (rng.choice("bdfgkl") + rng.choice("aeiou") for _ in range(length))
    return {
        "prompt": " ".join(words),
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


if __name__ == "__main__":
    main()
