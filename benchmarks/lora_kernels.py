"""The adapters' share of a step by itself, on a GPU: fused kernels beside `gather_mm`, plain products and masked dense.

    python benchmarks/lora_kernels.py [--rows 1 16 64 128 256] [--layers 36] [--rank 16] [--out FILE]

All seven linears of every layer of Qwen3-8B's shape have adapters in eight slots. The layers' arrays are distinct and
their computations follow one from the other as in the model, in one compiled function; the outputs of the model's own
linears are given, so that a step is adapters' work and nothing else. "mixed" rows are spread over eight adapters.

- step: microseconds of a layer with two steps in flight; host: of those, what building and launching it takes;
- bytes: what the fused kernels have to read and write at least, of a layer;
- kernels: microseconds of each fused kernel by itself, one layer's behind the other's;
- error: against float32, of the largest number.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import mlx.core as mx
import numpy as np

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.ops.lora.kernel import LoraKernels
from mlx_tandem.model.ops.lora.routes import Ints, cut_tiles
from mlx_tandem.model.ops.lora.choice import expected, far

SLOTS = 8
launch: Any = mx.async_eval
Arrays = list[mx.array]
Step = Callable[[mx.array, Arrays, Arrays], Arrays]
"""Function from x of the first layer, the ids and the arrays of all groups to the outputs of all linears."""


class Group:
    """The linears of one input, in every layer."""

    def __init__(self, inputs: int, outputs: Sequence[int]):
        self.inputs, self.outputs = inputs, outputs

    def make(self, rank: int, rows: int, dtype: mx.Dtype) -> Arrays:
        """Return random arrays of the group."""
        a = [mx.random.normal((SLOTS + 1, self.inputs, rank)) * self.inputs**-0.5 for _ in self.outputs]
        b = [mx.random.normal((SLOTS + 1, rank, n)) * 0.1 * rank**-0.5 for n in self.outputs]
        for one in a + b:
            one[0] = 0
        y = [mx.random.normal((rows, 1, n)) for n in self.outputs]
        made = [one.astype(dtype) for one in a + b + y]
        mx.eval(made)
        return made

    def parts(self, arrays: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Return A, B and the own outputs of each member."""
        n = len(self.outputs)
        return arrays[:n], arrays[n : 2 * n], arrays[2 * n :]


def groups(hidden: int, kv: int, mlp: int) -> dict[str, Group]:
    """Return the groups of a layer; the first output of each is as wide as the input of the next, which it becomes."""
    return {
        "qkv": Group(hidden, (hidden, kv, kv)),
        "o": Group(hidden, (hidden,)),
        "gate-up": Group(hidden, (mlp, mlp)),
        "down": Group(mlp, (hidden,)),
    }


# --- ways -----------------------------------------------------------------------------------------------------------

Way = Callable[[mx.array, Arrays, tuple[Arrays, Arrays, Arrays]], Arrays]


def fused(kernels: LoraKernels) -> Way:
    """Return the way of the fused kernels."""
    return lambda x, ids, parts: kernels.add(x, ids[0], *parts)


def gather(x: mx.array, ids: Arrays, parts: tuple[Arrays, Arrays, Arrays]) -> Arrays:
    """Return the outputs by `gather_mm`."""

    def delta(a: mx.array, b: mx.array) -> mx.array:
        u = mx.gather_mm(x, a, lhs_indices=ids[2], rhs_indices=ids[1])
        return mx.gather_mm(u, b, lhs_indices=ids[2], rhs_indices=ids[1])

    return [y + delta(a, b) for a, b, y in zip(*parts, strict=True)]


def plain(x: mx.array, ids: Arrays, parts: tuple[Arrays, Arrays, Arrays]) -> Arrays:
    """Return the outputs by one adapter's own arrays, as in a step of one adapter."""
    return [mx.addmm(y[:, 0], x[:, 0] @ a[1], b[1])[:, None] for a, b, y in zip(*parts, strict=True)]


def masked(x: mx.array, ids: Arrays, parts: tuple[Arrays, Arrays, Arrays]) -> Arrays:
    """Return the outputs by all slots side by side: A [inputs, slots * rank] and B [slots * rank, outputs]."""
    return [mx.addmm(y, (x @ a) * ids[3], b) for a, b, y in zip(*parts, strict=True)]


def side_by_side(group: Group, arrays: Arrays) -> Arrays:
    """Return the group's arrays with all slots side by side."""
    a, b, y = group.parts(arrays)
    wide = [mx.contiguous(one[1:].transpose(1, 0, 2).reshape(group.inputs, -1)) for one in a]
    wide += [one[1:].reshape(-1, one.shape[2]) for one in b]
    mx.eval(wide)
    return wide + y


def make_step(shapes: Sequence[Group], way: Way) -> Step:
    """Return a compiled step."""

    def step(x: mx.array, ids: Arrays, arrays: Arrays) -> Arrays:
        all_of_it: Arrays = []
        at = 0
        for group in shapes:
            size = 3 * len(group.outputs)
            out = way(x, ids, group.parts(arrays[at : at + size]))
            x = out[0]
            all_of_it += out
            at += size
        return all_of_it

    return mx.compile(step)


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(step: Callable[[], Arrays], rounds: int, steps: int) -> tuple[float, float]:
    """Return the seconds of a step with two in flight, and of building and launching one; medians of the rounds."""
    for _ in range(3):
        mx.eval(step())
    whole, host = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        flight = step()
        launch(flight)
        for _ in range(steps - 1):
            following = step()
            launch(following)
            mx.eval(flight)
            flight = following
        mx.eval(flight)
        whole.append((time.perf_counter() - started) / steps)
        started = time.perf_counter()
        flight = step()
        launch(flight)
        host.append(time.perf_counter() - started)
        mx.eval(flight)
    return statistics.median(whole), statistics.median(host)


def by_kernel(
    kernels: LoraKernels, group: Group, layers: Sequence[Arrays], x: mx.array, tiles: mx.array, rounds: int
) -> tuple[float, float]:
    """Return the seconds of one shrink and of one expand, where each layer's waits for the one before."""

    def shrinks() -> Arrays:
        sums: Arrays = []
        for arrays in layers:
            own = mx.depends(x, sums[-1]) if sums else x
            sums.append(kernels.shrink(own, tiles, group.parts(arrays)[0]))
        return sums

    sums = shrinks()
    mx.eval(sums)

    def expands() -> Arrays:
        out: Arrays = []
        for own, arrays in zip(sums, layers, strict=True):
            _, b, y = group.parts(arrays)
            own = mx.depends(own, out[0]) if out else own
            out = kernels.expand(own, tiles, b, y, x.shape[:-1])
        return out

    return measure(shrinks, rounds, 4)[0] / len(layers), measure(expands, rounds, 4)[0] / len(layers)


def worst_error(way: Way, group: Group, arrays: Arrays, ids: Arrays, x: mx.array, slots: Ints) -> float:
    """Return the largest relative error of a way."""
    a, b, y = group.parts(arrays)
    added = way(x, ids, (a, b, y))
    return max(far(z, y[m], expected(x, a[m], b[m], slots)) for m, z in enumerate(added))


def least_bytes(group: Group, rows: int, slots: int, rank: int, parts: int, size: int) -> int:
    """Return the fewest bytes that a group has to read and write."""
    widths = group.inputs * len(group.outputs) + sum(group.outputs)
    sums = 2 * 4 * rows * parts * rank * len(group.outputs)
    return size * (slots * rank * widths + rows * (group.inputs + 2 * sum(group.outputs))) + sums


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 128, 256])
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs=3, default=[4096, 1024, 12288], help="hidden, keys, MLP")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--ways", nargs="+", default=["fused", "gather", "plain", "masked"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = getattr(mx, options.dtype)
    kinds = groups(*options.widths)
    targets = dialect.available()
    kernels = LoraKernels(dialect.maker(targets[0])) if targets else None
    ways: dict[str, Way] = {"gather": gather, "plain": plain, "masked": masked}
    if kernels is not None:
        ways["fused"] = fused(kernels)
    results = []
    for rows in options.rows:
        mx.random.seed(rows)
        made = {name: [g.make(options.rank, rows, dtype) for _ in range(options.layers)] for name, g in kinds.items()}
        x = mx.random.normal((rows, 1, options.widths[0])).astype(dtype)
        for mix in ("same", "mixed"):
            slots = np.sort(1 + np.arange(rows) % (SLOTS if mix == "mixed" else 1))
            ids = [
                mx.array(cut_tiles(slots, 1), mx.int32),
                mx.array(slots, mx.uint32),
                mx.arange(rows, dtype=mx.uint32),
            ]
            mask = np.repeat(slots[:, None] == np.arange(1, SLOTS + 1), options.rank, 1)[:, None]
            ids.append(mx.array(mask).astype(dtype))
            row: dict[str, Any] = {"rows": rows, "slots": mix, "tiles": ids[0].shape[0]}
            times: dict[str, dict[str, float]] = {}
            for name in options.ways:
                if name not in ways or (name == "plain" and mix == "mixed"):
                    continue
                step = make_step(list(kinds.values()) * options.layers, ways[name])
                arrays = []
                for layer in range(options.layers):
                    for kind, group in kinds.items():
                        own = made[kind][layer]
                        arrays += side_by_side(group, own) if name == "masked" else own
                whole, host = measure(partial(step, x, ids, arrays), options.rounds, options.steps)
                times[name] = {"step_us": round(whole / options.layers * 1e6, 2)}
                times[name] |= {"host_us": round(host / options.layers * 1e6, 2), "whole_ms": round(whole * 1e3, 3)}
            row["layer"] = times
            if kernels is not None:
                alone: dict[str, dict[str, float]] = {}
                size, error = 0, 0.0
                for kind, group in kinds.items():
                    given = mx.random.normal((rows, 1, group.inputs)).astype(dtype)
                    sums = kernels.shrink(given, ids[0], group.parts(made[kind][0])[0])
                    size += least_bytes(group, rows, len(set(slots.tolist())), options.rank, sums.shape[2], dtype.size)
                    error = max(error, worst_error(fused(kernels), group, made[kind][0], ids, given, slots))
                    shrink, expand = by_kernel(kernels, group, made[kind], given, ids[0], options.rounds)
                    alone[kind] = {"shrink_us": round(shrink * 1e6, 2), "expand_us": round(expand * 1e6, 2)}
                row |= {"kernels": alone, "bytes": size, "error": error}
            results.append(row)
            print(json.dumps(row))
    if options.out:
        report = describe() | {
            "device": backend.current().describe(),
            "options": vars(options) | {"out": None},
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
