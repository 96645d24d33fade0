"""The fused attention kernels on this machine's GPU: whether they are right, and how fast they read the pool.

    python benchmarks/attention.py [--checks quick|all|none] [--dtype bfloat16] [--rounds 5] [--out FILE]
                                   [--shapes 64x1024,1x8192] [--splits N …] [--warps N …] [--depth N …]

- checks: kernels compiled for types, head sizes, groups, bits, lengths, windows, sinks and caps beside float64 on the
  host; `quick` compiles each value of each of them, `all` every combination;
- decode: microseconds of one layer's attention, from a chain of calls on as many different pools as a model has layers,
  so that neither launches nor the cache of the device make it look faster or slower than it is; bytes are those of the
  keys and values that are read. With several splits, warps or depths each combination is timed.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_tandem.model import backend

import mlx.core as mx
import numpy as np

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.ops.attention.division import start
from mlx_tandem.model.ops.attention.paged import EVERYTHING, PagedAttention
from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.checking import copy_bandwidth

BLOCK = 16
LAYERS = 36
SHAPES = ((1, 128), (1, 8192), (16, 192), (64, 192), (64, 1024), (32, 4096), (128, 192), (256, 192))
TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
DIMS, GROUPS, BITS = (64, 80, 96, 128, 256), (1, 2, 4, 8), (0, 8, 4)

Combination = tuple[str, int, int, int, int, bool]  # type, head size, group, bits, queries of a row, sinks and so on


def combinations(which: str) -> Iterator[Combination]:
    """Yield the kernels to check: type, head size, group, bits, queries per row, and whether there are sinks and the
    like.
    """
    if which == "all":
        for name, dim, group, bits, length in itertools.product(TYPES, DIMS, GROUPS, BITS, (1, 5)):
            yield name, dim, group, bits, length, length > 1
    elif which == "quick":
        names = itertools.cycle(TYPES)
        for i, (dim, group) in enumerate(itertools.product(DIMS, GROUPS)):
            yield next(names), dim, group, BITS[i % 5] if i % 5 < 3 else 0, (1, 1, 4, 8)[(i + i // 4) % 4], i % 3 == 0


def check(make: dialect.Make, combination: Combination, seed: int) -> float:
    """Return the relative error of a random case in the 2-norm."""
    name, dim, group, bits, length, more = combination
    rng = np.random.default_rng(seed)
    rows, kv_heads, width = 3, 2, 24
    form = RowFormat(kv_heads, dim, TYPES[name], bits, 64)
    blocks = 1 + rows * width
    tables = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    offsets = rng.integers(0, width * BLOCK - length, rows).astype(np.int32)
    window, cap = (int(rng.integers(1, 200)), 5.0) if more else (EVERYTHING, 0.0)
    queries = mx.array(rng.standard_normal((rows, kv_heads * group, length, dim)).astype(np.float32)).astype(form.dtype)
    sinks = mx.array(rng.standard_normal(kv_heads * group).astype(np.float32)).astype(form.dtype) if more else None
    pool, halves = [], []
    for _ in range(2):
        numbers = rng.standard_normal((kv_heads * blocks * BLOCK, dim)).astype(np.float32)
        lines = form.encode(mx.array(numbers).astype(form.dtype))
        pool += lines
        halves.append(np.array(form.decode(lines).astype(mx.float32)).reshape(kv_heads, blocks, BLOCK, dim))
    attention = PagedAttention(make, form, BLOCK, start(dialect.available()[0], form))
    scale = dim**-0.5
    worst = 0.0
    expected = np.zeros(queries.shape)
    asked = np.array(queries.astype(mx.float32), np.float64)
    for row in range(rows):
        keys, values = (
            h[:, tables[row]].reshape(kv_heads, -1, dim).repeat(group, 0).astype(np.float64) for h in halves
        )
        scores = asked[row] @ keys.swapaxes(1, 2) * scale
        scores = cap * np.tanh(scores / cap) if cap else scores
        key, query = np.arange(width * BLOCK)[None], offsets[row] + np.arange(length)[:, None]
        scores = np.where((key <= query) & (key > query - window), scores, -np.inf)
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(np.array(sinks.astype(mx.float32), np.float64))[:, None, None]
        expected[row] = weights @ values / total
    for splits in (1, 3):
        got = attention(
            queries,
            pool,
            mx.array(tables),
            mx.array(offsets),
            scale,
            window=window,
            sinks=sinks,
            cap=cap,
            splits=splits,
        ).swapaxes(1, 2)
        error = np.linalg.norm(np.array(got.astype(mx.float32)) - expected) / np.linalg.norm(expected)
        worst = max(worst, float(error) if np.isfinite(error) else float("inf"))
    return worst


def decode(
    make: dialect.Make,
    rows: int,
    context: int,
    form: RowFormat,
    group: int,
    rounds: int,
    divisions: Sequence[dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield for each way to divide the work the median round of `LAYERS` calls; each has the output of the one
    before as its queries.
    """
    width = -(-context // BLOCK)
    blocks = 1 + rows * width
    rng = np.random.default_rng(0)
    tables = mx.array(1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32))
    offsets = mx.full((rows,), context - 1, mx.int32)
    lines = form.encode(mx.random.normal((1024, form.dim)).astype(form.dtype)) * 2
    tokens = form.heads * blocks * BLOCK
    pools = []
    for _ in range(LAYERS):
        pools.append([mx.contiguous(mx.tile(a, (-(-tokens // 1024), 1))[:tokens]) for a in lines])
        mx.eval(pools[-1])
    queries = mx.random.normal((rows, form.heads * group, 1, form.dim)).astype(form.dtype)

    read = rows * context * 2 * form.bytes_per_token()
    for division in divisions:
        first = start(dialect.available()[0], form)
        attention = PagedAttention(make, form, BLOCK, replace(first, depth=division["depth"] or first.depth))
        cut = {name: division[name] for name in ("splits", "warps")}

        def layers(
            queries: mx.array,
            tables: mx.array,
            offsets: mx.array,
            pools: list[list[mx.array]],
            attention: PagedAttention = attention,
            cut: dict[str, Any] = cut,
        ) -> mx.array:
            for pool in pools:
                queries = attention(queries, pool, tables, offsets, form.dim**-0.5, shape=queries.shape, **cut)
            return queries

        run = mx.compile(layers)
        for _ in range(3):
            mx.eval(run(queries, tables, offsets, pools))
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            for _ in range(4):
                made = run(queries, tables, offsets, pools)
                mx.async_eval(made)  # type: ignore[no-untyped-call]
            mx.eval(made)
            times.append((time.perf_counter() - started) / (4 * LAYERS))
        seconds = statistics.median(times)
        yield division | {
            "microseconds": round(seconds * 1e6, 2),
            "bytes": read,
            "bytes_per_second": round(read / seconds),
        }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checks", choices=["quick", "all", "none"], default="quick")
    parser.add_argument("--dtype", choices=list(TYPES), default="bfloat16")
    parser.add_argument("--shapes", default=",".join(f"{r}x{c}" for r, c in SHAPES))
    parser.add_argument("--heads", type=int, default=8, help="of keys and values")
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--bits", type=int, nargs="+", default=[0, 8])
    for name in ("splits", "warps", "depth"):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=[0], help="0: as the kernels choose")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    divisions = [
        {"splits": splits, "warps": warps, "depth": depth}
        for splits, warps, depth in itertools.product(options.splits, options.warps, options.depth)
    ]
    targets = dialect.available()
    if not targets:
        parser.error("there is no GPU that MLX can use")
    make = dialect.maker(targets[0])
    report: dict[str, Any] = describe() | {"device": backend.current().describe(), "target": targets[0]}
    checks = {}
    for seed, combination in enumerate(combinations(options.checks)):
        name, dim, group, bits, length, more = combination
        says = f"{name}, {group} heads of {dim}, {bits or 'all'} bits, {length} queries" + ", window, sinks, cap" * more
        error = check(make, combination, seed)
        checks[says] = error
        print(f"{'ok   ' if error <= TOLERANCE[name] else 'WRONG'} {error:.1e} {says}", flush=True)
    report["checks"] = checks
    report["copy_bytes_per_second"] = copy = copy_bandwidth()
    print(f"copying: {copy / 1e12:.2f} TB/s")
    report["decode"] = []
    for bits in options.bits:
        form = RowFormat(options.heads, options.dim, TYPES[options.dtype], bits, 64)
        for rows, context in (tuple(int(n) for n in shape.split("x")) for shape in options.shapes.split(",")):
            for found in decode(make, rows, context, form, options.group, options.rounds, divisions):
                found = {"rows": rows, "context": context, "bits": bits} | found
                found["share_of_copy"] = round(found["bytes_per_second"] / copy, 3)
                report["decode"].append(found)
                says = f"{rows:4} x {context:5}, {bits or 16:2} bits"
                if len(divisions) > 1:
                    says += f", {found['splits']:3} splits, {found['warps']} warps, depth {found['depth']}"
                print(
                    f"{says}: {found['microseconds']:8.2f} µs {found['bytes_per_second'] / 1e12:5.2f} TB/s, "
                    f"{found['share_of_copy']:.0%} of copying",
                    flush=True,
                )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
