"""Measure what a batch's sampling costs, compared with formulations that were rejected.

    python benchmarks/sampling.py [--rows 1 32] [--vocabulary 512 1024 32768] [--rounds 40] [--out FILE]

All variants are compiled and interleaved in one process; a variant's time is the median of its rounds.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import mlx.core as mx
import numpy as np

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.engine.plan import Seating
from mlx_tandem.model.ops.sampling.sampler import SamplingFlags, gumbel_noise, sample
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.types import SamplingParams

Step = Callable[[mx.array, mx.array], mx.array]


def variants(rows: int, vocabulary: int) -> dict[str, Step]:
    """Return functions that sample one token per row from logits [rows, vocabulary] at positions [rows].

    Every second row has top-p 0.9.
    """
    seats = Seats(rows, vocabulary)
    for i in range(rows):
        params = SamplingParams(max_tokens=1, temperature=0.7 + 0.3 * (i % 2), top_p=(0.9, 1.0)[i % 2], seed=i)
        seats.take(Seating(i, params, 0, 1, (0,)))
    chosen = list(range(rows))
    flags = seats.flags(chosen)
    arrays = seats.arrays(chosen, flags)
    plain = SamplingFlags(noise=True)

    def drawn(flags: SamplingFlags) -> Step:
        return lambda logits, position: sample(logits, position, arrays, flags, None).tokens

    def sorted_top_p(logits: mx.array, position: mx.array) -> mx.array:
        p = mx.softmax(logits / arrays.temperature, -1)
        descending = -mx.sort(-p, -1)
        before = mx.cumsum(descending, -1) - descending
        threshold = mx.where(before < arrays.top_p, descending, mx.inf).min(-1, keepdims=True)
        race = mx.log(p) + gumbel_noise(arrays.key, position, vocabulary)
        return mx.argmax(mx.where(p >= threshold, race, -mx.inf), -1)

    def library_noise(logits: mx.array, position: mx.array) -> mx.array:
        keys = mx.stack([arrays.key[:, 0], position.astype(mx.uint32)], 1)
        noise = mx.vmap(lambda k: mx.random.gumbel(shape=(vocabulary,), key=k))(keys)
        return mx.argmax(logits / arrays.temperature + noise, -1)

    def partition(logits: mx.array, position: mx.array) -> mx.array:
        del position
        return mx.argpartition(-logits, 64, -1)[:, :64].sum(-1)

    return {
        "greedy": drawn(SamplingFlags()),
        "temperature (taken)": drawn(plain),
        "temperature, mx.random": library_noise,
        "top-p by throwing (taken)": drawn(flags),
        "top-p by sort": sorted_top_p,
        "argpartition of 64 alone": partition,
        "with logprob": drawn(SamplingFlags(noise=True, logprobs=0)),
        "with 5 top logprobs": drawn(SamplingFlags(noise=True, logprobs=5)),
    }


def measure(rows: int, vocabulary: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of each variant."""
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(0, 2, (rows, vocabulary)).astype(np.float32))
    position = mx.array(np.arange(rows, dtype=np.int32))
    steps = {name: mx.compile(step) for name, step in variants(rows, vocabulary).items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 3):
        for name, step in steps.items():
            started = time.perf_counter()
            mx.eval(step(logits, position))
            if i >= 3:
                times[name].append((time.perf_counter() - started) * 1e3)
    return {name: round(statistics.median(t), 4) for name, t in times.items()}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[512, 1024, 32768])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for vocabulary in options.vocabulary:
        for rows in options.rows:
            times = measure(rows, vocabulary, options.rounds)
            results.append({"rows": rows, "vocabulary": vocabulary, "milliseconds": times})
            print(f"{rows} rows, vocabulary {vocabulary}")
            for name, ms in times.items():
                print(f"  {name:28} {ms:9.3f} ms")
    if options.out:
        report = describe() | {"device": backend.current().describe(), "results": results}
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
