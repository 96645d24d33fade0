"""The product of few rows by itself, on a GPU: the kernel in several forms beside MLX's own product.

    python benchmarks/skinny.py [--rows 1 2 4 8 16 24 32 48 64] [--forms 2,8,4 …] [--shapes qkv o …] [--out FILE]

The linears of Qwen3-8B's shape, random weights. A chain of products, each by weights of its own and of what the one
before it gave, in one graph:

- device: microseconds of a product, the host's work hidden behind that of a long computation before the chain;
- wall: of the chain by itself; host: of that, what building and launching it takes. Not compiled: a call of the kernel
  makes its source anew then, which in a compiled step it does not;
- share: of the measured copy bandwidth, counting what has to be read and written at least;
- error: against float32 sums on the host, of the largest number.

A form is tiles,warps,stages (`Form` in ops/products/skinny.py); that with the shortest wall comes first.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mlx_tandem.model import backend  # first: it loads a fast BLAS before MLX

import mlx.core as mx
import numpy as np

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.ops.products.skinny import Form, Skinny, eighths
from mlx_tandem.model.kernels.checking import copy_bandwidth

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate-up": (24576, 4096),
    "down": (4096, 12288),
    "lm_head": (151936, 4096),
}
FORMS = ["1,8,6", "2,8,3", "2,8,4", "2,8,6", "3,8,3", "3,8,4", "4,4,3", "4,4,4"]
BYTES, MOST = 2 << 30, 48  # most bytes of a chain's weights, and most products
ROUNDS = 5
launch: Any = mx.async_eval
Product = Callable[[mx.array, mx.array], mx.array]


def link(x: mx.array, y: mx.array) -> mx.array:
    """Return the next input, of the shape of x: a view of y if that is large enough."""
    if y.size >= x.size:
        return y.reshape(-1)[: x.size].reshape(x.shape)
    return mx.maximum(x, y[..., :1])


def chain(product: Product, x: mx.array, weights: list[mx.array]) -> mx.array:
    """Return the result of products by these weights, each of the output of the one before."""
    for weight in weights:
        y = product(x, weight)
        x = link(x, y)
    return y


def timed(product: Product, x: mx.array, weights: list[mx.array]) -> dict[str, float]:
    """Return the microseconds of a product."""
    mx.eval(chain(product, x, weights))
    walls, hosts = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        y = chain(product, x, weights)
        launch(y)
        hosts.append(time.perf_counter() - started)
        mx.eval(y)
        walls.append(time.perf_counter() - started)
    behind = [hidden(product, x, weights) - hidden(None, x, weights) for _ in range(ROUNDS)]
    times = {"device": float(np.median(behind)), "wall": min(walls), "host": min(hosts)}
    return {f"{name}_us": round(t / len(weights) * 1e6, 2) for name, t in times.items()}


_big: list[mx.array] = []


def hidden(product: Product | None, x: mx.array, weights: list[mx.array]) -> float:
    """Return the seconds of a chain and of a computation before it that takes longer than the host needs for the
    chain.

    Without a product, return the seconds of that computation and of the links.
    """
    if not _big:
        _big.append(mx.random.normal((8192, 8192)).astype(mx.bfloat16))
        mx.eval(_big)
    computes = x.size > x.size // x.shape[-1] * weights[0].shape[0]
    started = time.perf_counter()
    first = _big[0]
    for _ in range(6):
        first = first @ _big[0]
    launch(first)
    x = mx.maximum(x, first[:1, :1] * 0)
    if product is not None:
        mx.eval(chain(product, x, weights))
    else:
        for _ in weights if computes else ():
            x = mx.maximum(x, x[..., :1])
        mx.eval(x)
    return time.perf_counter() - started


def error(product: Product, x: mx.array, weight: mx.array) -> float:
    """Return the relative error of a product."""
    some = weight[: min(len(weight), 4096)]
    want = np.array(x[:, 0].astype(mx.float32)) @ np.array(some.astype(mx.float32)).T
    got = np.array(product(x, weight)[:, 0, : len(some)].astype(mx.float32))
    return float(np.abs(got - want).max() / np.abs(want).max())


def with_form(skinny: Skinny, form: Form, x: mx.array, weight: mx.array) -> mx.array:
    """Return the product by the kernel in this form."""
    return skinny(x, weight, None, form)


def plain(x: mx.array, weight: mx.array) -> mx.array:
    """Return the product by MLX."""
    return x @ weight.T


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 24, 32, 48, 64])
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dtype = getattr(mx, options.dtype)
    skinny = Skinny(dialect.maker("cuda"))
    forms = [Form(*map(int, form.split(","))) for form in options.forms]
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    results = []
    for name in options.shapes:
        outputs, inputs = SHAPES[name]
        count = max(2, min(MOST, BYTES // (2 * outputs * inputs)))
        weights = [(mx.random.normal((outputs, inputs)) * inputs**-0.5).astype(dtype) for _ in range(count)]
        mx.eval(weights)
        for rows in options.rows:
            x = mx.random.normal((rows, 1, inputs)).astype(dtype)
            mx.eval(x)
            least = dtype.size * (outputs * inputs + rows * (inputs + outputs)) / bandwidth * 1e6
            ways: list[dict[str, Any]] = []
            for form in (None, *forms):
                if form is not None and form.room(eighths(rows)) > dialect.most_room():
                    continue
                product = plain if form is None else partial(with_form, skinny, form)
                way: dict[str, Any] = {"form": form and ",".join(map(str, form))}
                way |= timed(product, x, weights)
                way |= {"share": round(least / way["device_us"], 3), "error": error(product, x, weights[0])}
                ways.append(way)
            own = sorted(ways[1:], key=lambda way: way["wall_us"])
            results.append({"shape": name, "rows": rows, "floor_us": round(least, 2), "plain": ways[0], "kernel": own})
            print(f"{name} {rows} rows, floor {least:.1f} us")
            for way in (ways[0], *sorted(own, key=lambda way: way["device_us"])):
                print(f"   {json.dumps(way)}", flush=True)
        del weights
        mx.clear_cache()
    if options.out:
        report = describe() | {
            "device": backend.current().describe(),
            "options": vars(options) | {"out": None},
            "copy_bandwidth": bandwidth,
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
