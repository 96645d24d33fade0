"""Measure which formulation of the LoRA delta is fastest, in whole compiled steps.

    python benchmarks/lora_delta.py [--models 0.13M 4M] [--rows 1 8 16 64] [--rounds 5] [--out FILE]

Every variant runs in the same process on the same random model, interleaved in many short rounds. A variant's time
is the tenth percentile of its rounds, so that other load on the machine counts little.
"""

# ruff: noqa: I001
from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

from mlx_tandem.model import device  # first: it loads a fast BLAS before MLX

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig
from mlx_tandem.model.ops.lora import state as lora
from mlx_tandem.model.ops.lora import routes
from mlx_tandem.types import AdapterInfo

SHAPES: dict[str, dict[str, int]] = {
    "0.13M": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
    "4M": {"hidden_size": 256, "num_hidden_layers": 5, "intermediate_size": 768, "num_attention_heads": 8,
           "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 1024},
}  # fmt: skip
BLOCK = 16
CONTEXT = 128
ADAPTERS = 8
RANK = 16


def _blas() -> ctypes.CDLL | None:
    return ctypes.CDLL(device.OPENBLAS) if device.OPENBLAS else None


def _kernels() -> str | None:
    blas = _blas()
    if blas is None:
        return None
    blas.openblas_get_corename.restype = blas.openblas_get_config.restype = ctypes.c_char_p
    return f"{blas.openblas_get_config().decode().split(' NO_')[0]}, {blas.openblas_get_corename().decode()} kernels"


def build(shape: dict[str, int]) -> Any:
    """Return a random model of this shape."""
    args_class: Any = qwen3.ModelArgs
    args = args_class.from_dict(
        {"model_type": "qwen3", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4,
         "tie_word_embeddings": True, **shape}
    )  # fmt: skip
    mx.random.seed(0)
    model: Any = qwen3.Model(args)
    parameters: Any = tree_flatten(model.parameters())
    weights = [
        (k, mx.ones_like(v) if v.ndim == 1 else mx.random.normal(v.shape) * v.shape[-1] ** -0.5) for k, v in parameters
    ]
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def random_adapter(linears: dict[str, LinearShape], rank: int, seed: int) -> AdapterWeights:
    """Return a random adapter."""
    g = np.random.default_rng(seed)
    tensors = {
        path: (
            (g.standard_normal((s.inputs, rank)) * s.inputs**-0.5).astype(np.float32),
            (g.standard_normal((rank, s.outputs)) * rank**-0.5 * 0.1).astype(np.float32),
        )
        for path, s in linears.items()
    }
    return AdapterWeights(AdapterInfo(f"{seed}", rank, 1.0, "peft", (), 0, 0), tensors)


# --- the variants ------------------------------------------------------------------------------------------------
#
# Those of the product run the product's own code. The others: prepare(state, slots) makes the step's arguments on the
# host, delta(x, y, extra, i) gives y + delta for module i inside the compiled step. "[i]" of `own` are its arrays.

Prepare = Callable[["Trial", Sequence[int]], list[mx.array]]
Delta = Callable[[mx.array, mx.array, list[mx.array], int], mx.array]


class Variant(NamedTuple):
    """A formulation of the delta."""

    prepare: Prepare
    delta: Delta


class Product(NamedTuple):
    """The product's own code with one of its back ends."""

    backend: Literal["gather", "windows"]


def ids(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """Return the rows' slots (once, if they are all the same), then every module's stacked A and B."""
    return [mx.array(list(slots) if len(set(slots)) > 1 else [slots[0]], mx.uint32), *state.stacked]


def own_slot(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """Return the slot's own A and B of every module, as views."""
    return [mx.zeros(()), *(x[slots[0]] for x in state.stacked)]


def take_addmm(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by indexing the slot and `addmm`."""
    slot, a, b = extra[0][0], extra[1 + 2 * i], extra[2 + 2 * i]
    return mx.addmm(y, x @ a[slot], b[slot])


def one_gather(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by `gather_mm` over one slot."""
    slot, a, b = extra[0], extra[1 + 2 * i], extra[2 + 2 * i]
    u = mx.gather_mm(x.reshape(1, -1, x.shape[-1]), a, rhs_indices=slot)
    return y + mx.gather_mm(u, b, rhs_indices=slot).reshape(y.shape)


def own_addmm(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by `addmm` with the slot's own arrays."""
    return mx.addmm(y, x @ extra[1 + 2 * i], extra[2 + 2 * i])


def own_add(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by plain products with the slot's own arrays."""
    return y + (x @ extra[1 + 2 * i]) @ extra[2 + 2 * i]


def gather(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by `gather_mm` over the rows' slots."""
    slots, a, b = extra[0], extra[1 + 2 * i], extra[2 + 2 * i]
    return y + mx.gather_mm(mx.gather_mm(x, a, rhs_indices=slots), b, rhs_indices=slots)


def take_matmul(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by plain products with copies of the rows' slots."""
    slots, a, b = extra[0], extra[1 + 2 * i], extra[2 + 2 * i]
    return y + (x @ a[slots]) @ b[slots]


def dense_slots(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """Return the weights of just the slots of the batch side by side, for masked products."""
    used = sorted(set(slots))
    made = []
    for n, x in enumerate(state.stacked):
        x = x[mx.array(used)]
        x = x.transpose(1, 0, 2).reshape(x.shape[1], -1) if n % 2 == 0 else x.reshape(-1, x.shape[-1])
        made.append(mx.contiguous(x))
    mask = np.repeat(np.array(slots)[:, None] == np.array(used)[None], RANK, 1)[:, None]
    return [mx.array(mask.astype(np.float32)), *made]


def masked(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by one product with all slots, of which a mask keeps each row's own."""
    return mx.addmm(y, (x @ extra[1 + 2 * i]) * extra[0], extra[2 + 2 * i])


def tiles(size: int) -> Prepare:
    """Return a function that deals rows into tiles of `size` rows of one slot.

    Its arrays are the row of each place, each row's place, and each tile's slot.
    """

    def prepare(state: Trial, slots: Sequence[int]) -> list[mx.array]:
        s = np.array(slots)
        perm: list[int] = []
        owner: list[int] = []
        back = np.zeros(len(s), np.int32)
        for slot in np.unique(s):
            rows = np.flatnonzero(s == slot)
            back[rows] = np.arange(len(rows)) + len(perm)
            count = -(-len(rows) // size)
            perm += [*rows, *[rows[-1]] * (count * size - len(rows))]
            owner += [slot] * count
        return [mx.array(np.array(owner, np.uint32)), *state.stacked, mx.array(np.array(perm)), mx.array(back)]

    return prepare


def tiled(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by products of tiles."""
    owner, a, b, perm, back = extra[0], extra[1 + 2 * i], extra[2 + 2 * i], extra[-2], extra[-1]
    u = x.reshape(-1, x.shape[-1])[perm].reshape(owner.shape[0], -1, x.shape[-1])
    d = mx.gather_mm(mx.gather_mm(u, a, rhs_indices=owner), b, rhs_indices=owner)
    return y + d.reshape(-1, d.shape[-1])[back].reshape(y.shape)


SHARE = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def side_by_side(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """Give q, k and v (gate and up) one A of three (two) times the rank, and a B with zeros for the others' part of
    it.

    The product with A is then the same operation for all of them, and the compiler keeps one.
    """
    made = []
    for i, path in enumerate(state.linears()):
        parent, _, leaf = path.rpartition(".")
        names = next((n for n in SHARE if leaf in n), (leaf,))
        many = [state.number[f"{parent}.{n}"] for n in names]
        if leaf == names[0]:
            state.shared[many[0]] = mx.concatenate([state.stacked[2 * j] for j in many], -1)
        before = RANK * many.index(i)
        b = mx.pad(state.stacked[2 * i + 1], [(0, 0), (before, RANK * (len(many) - 1) - before), (0, 0)])
        made += [state.shared[many[0]], b]
    if len(set(slots)) == 1:
        return [mx.zeros(()), *(x[slots[0]] for x in made)]
    return [mx.array(list(slots), mx.uint32), *made, mx.arange(len(slots)).astype(mx.uint32)]


def gather_both(x: mx.array, y: mx.array, extra: list[mx.array], i: int) -> mx.array:
    """Return y + delta by `gather_mm` with the order of the rows given."""
    slots, a, b, order = extra[0], extra[1 + 2 * i], extra[2 + 2 * i], extra[-1]
    u = mx.gather_mm(x, a, lhs_indices=order, rhs_indices=slots)
    return y + mx.gather_mm(u, b, lhs_indices=order, rhs_indices=slots)


UNIFORM: dict[str, Variant | Product] = {
    "product": Product("windows"),
    "own arrays, add": Variant(own_slot, own_add),
    "own arrays, addmm": Variant(own_slot, own_addmm),
    "own, A side by side": Variant(side_by_side, own_add),
    "take, addmm": Variant(ids, take_addmm),
    "gather_mm of one": Variant(ids, one_gather),
}
MIXED: dict[str, Variant | Product] = {
    "product: rows": Product("gather"),
    "product: windows": Product("windows"),
    "gather_mm": Variant(ids, gather),
    "gather_mm, side by side": Variant(side_by_side, gather_both),
    "take, matmul": Variant(ids, take_matmul),
    "masked dense": Variant(dense_slots, masked),
    "tiles of 4": Variant(tiles(4), tiled),
    "tiles of 8": Variant(tiles(8), tiled),
}
PREFILL = ("product: rows", "gather_mm", "take, matmul", "masked dense")


class Trial(lora.LoraState):
    """A LoraState whose modules use the variant that is measured."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, LoraConfig(max_loras=16), mx.float32)
        self.delta: Delta | None = None
        self.extra: list[mx.array] = []
        adapters = [random_adapter(self.linears(), RANK, slot) for slot in range(1, ADAPTERS + 1)]
        for slot, adapter in enumerate(adapters, 1):
            self.install(slot, adapter)
        self.shared: dict[int, mx.array] = {}
        self.number = {path: i for i, path in enumerate(self.linears())}
        self.stacked = []
        for path in self.linears():
            for side in (0, 1):
                some = [x.tensors[path][side] for x in adapters]
                empty = np.zeros_like(some[0])
                self.stacked.append(mx.array(np.stack([empty, *some, *[empty] * (16 - ADAPTERS)])))
        mx.eval(self.stacked)

    def dense(self, t: Any, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """Return plain(x) + delta by the variant."""
        if self.delta is None:
            return super().dense(t, x, plain)
        return self.delta(x, plain(x), self.extra, self.number[t.path])

    def prepare(self, variant: Variant | Product | None, slots: Sequence[int]) -> tuple[Any, list[mx.array]]:
        """Return what to bind and the step's arguments."""
        if variant is None:
            return routes.Layout("base"), []
        if isinstance(variant, Variant):
            extra = variant.prepare(self, slots)
            mx.eval(extra)
            return variant.delta, extra
        self.backend = variant.backend
        self._routes.clear()
        with mock.patch.object(routes, "WINDOWS_FROM", routes.WINDOW):
            route = self.route(slots)
        if variant.backend == "windows" and route.layout.kind == "rows":
            raise ValueError("does not apply")
        return route.layout, [mx.zeros(()) if route.ids is None else mx.array(route.ids), *route.arrays]

    @contextmanager
    def using(self, what: Any, extra: list[mx.array]) -> Iterator[None]:
        """Use the variant while a step is traced."""
        if isinstance(what, routes.Layout):
            if extra:
                self.bind(extra[1:], extra[0], what)
        else:
            self.delta, self.extra = what, extra
        yield
        self.unbind()
        self.delta, self.extra = None, []


# --- whole steps -------------------------------------------------------------------------------------------------


class Paged:
    """One layer of a head-major paged pool like the engine's: [heads * blocks * BLOCK, d], with rows through tables."""

    def __init__(self, heads: int, blocks: int, dim: int) -> None:
        self.heads, self.blocks, self.dim = heads, blocks, dim

    def bind(self, k: mx.array, v: mx.array, offset: mx.array, write: mx.array, table: mx.array, mask: Any) -> None:
        """Set the arrays of a step."""
        self.k, self.v, self.offset, self.write, self.table, self.mask = k, v, offset, write, table, mask

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Return the step's mask."""
        return self.mask

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new keys and values, and return those of all positions."""
        self.k[self.write] = k.reshape(-1, self.dim)
        self.v[self.write] = v.reshape(-1, self.dim)
        return self.read(self.k), self.read(self.v)

    def read(self, pool: mx.array) -> mx.array:
        """Return the rows' blocks."""
        pages = pool.reshape(self.heads * self.blocks, BLOCK * self.dim)[self.table]
        return pages.reshape(-1, self.heads, self.table.shape[-1] * BLOCK, self.dim)


class Decode:
    """Decode steps of `rows` rows with CONTEXT tokens of cache each, one step in flight."""

    def __init__(self, model: nn.Module, shape: dict[str, int], state: Trial, rows: int) -> None:
        self.model, self.state, self.rows = model, state, rows
        heads, dim = shape["num_key_value_heads"], shape["head_dim"]
        per_row = CONTEXT // BLOCK
        blocks = rows * per_row
        self.layers = [Paged(heads, blocks, dim) for _ in range(shape["num_hidden_layers"])]
        pool = (heads * blocks * BLOCK, dim)
        self.k = [mx.random.normal(pool) for _ in self.layers]
        self.v = [mx.random.normal(pool) for _ in self.layers]
        self.tokens = mx.zeros((rows,), mx.int32)
        table = np.random.default_rng(0).permutation(blocks).reshape(rows, per_row)
        head = np.arange(heads)
        self.table = mx.array((table[:, None] + head[None, :, None] * blocks).astype(np.int32))
        place = table[:, -1] * BLOCK + BLOCK - 1
        self.write = mx.array((place[:, None] + head * blocks * BLOCK).reshape(-1).astype(np.int32))
        self.offset = mx.full((rows,), CONTEXT - 1, dtype=mx.int32)
        mx.eval(self.k, self.v, self.table, self.write, self.offset, self.tokens)

    def compiled(self, what: Any) -> Callable[..., Any]:
        """Return a compiled step."""

        def step(tokens, k, v, offset, write, table, extra):  # type: ignore[no-untyped-def]
            mask = (mx.arange(CONTEXT) <= offset[:, None])[:, None, None]
            for layer, lk, lv in zip(self.layers, k, v, strict=True):
                layer.bind(lk, lv, offset, write, table, mask)
            with self.state.using(what, extra):
                logits = self.model(tokens[:, None], cache=self.layers)[:, -1]
            return mx.argmax(logits, -1).astype(mx.int32), [x.k for x in self.layers], [x.v for x in self.layers]

        return mx.compile(step)

    def run(self, fn: Callable[..., Any], extra: list[mx.array], steps: int) -> float:
        """Return the seconds of a step."""
        launch: Any = mx.async_eval
        previous = None
        begin = time.perf_counter()
        for _ in range(steps):
            out, self.k, self.v = fn(self.tokens, self.k, self.v, self.offset, self.write, self.table, extra)
            launch(out, self.k, self.v)
            if previous is not None:
                previous.tolist()
            previous = out
        out.tolist()
        return (time.perf_counter() - begin) / steps


class Prefill:
    """Forwards of `rows` prompts of `length` tokens without a cache."""

    def __init__(self, model: nn.Module, state: Trial, rows: int, length: int) -> None:
        self.model, self.state = model, state
        self.tokens = mx.random.randint(0, 500, (rows, length))
        mx.eval(self.tokens)

    def compiled(self, what: Any) -> Callable[..., Any]:
        """Return a compiled forward."""

        def step(tokens, extra):  # type: ignore[no-untyped-def]
            with self.state.using(what, extra):
                return self.model.model(tokens)[:, -1]

        return mx.compile(step)

    def run(self, fn: Callable[..., Any], extra: list[mx.array], steps: int) -> float:
        """Return the seconds of a forward."""
        begin = time.perf_counter()
        for _ in range(steps):
            mx.eval(fn(self.tokens, extra))
        return (time.perf_counter() - begin) / steps


def trial(
    work: Any, state: Trial, slots: list[int], names: Sequence[str] | None, rounds: int, seconds: float
) -> dict[str, Any]:
    """Return the times of all variants for one batch."""
    steps: dict[str, tuple[Callable[..., Any], list[mx.array]]] = {"base": (work.compiled(routes.Layout("base")), [])}
    for name, variant in (UNIFORM if len(set(slots)) == 1 else MIXED).items():
        if names and name not in names:
            continue
        try:
            what, extra = state.prepare(variant, slots)
        except ValueError:
            continue
        steps[name] = (work.compiled(what), extra)
    times: dict[str, list[float]] = {name: [] for name in steps}
    once = 0.0
    for step in steps.values():
        work.run(*step, 4)
        once = max(once, work.run(*step, 4))
    count = max(3, int(seconds / once))
    for _ in range(rounds):
        for name, step in steps.items():
            work.run(*step, 1)  # its weights and the stack of threads come back from the variant before
            times[name].append(work.run(*step, count))
    return {
        name: {
            "ms": round(quiet(t) * 1e3, 4),
            "speed_of_base": round(quiet(times["base"]) / quiet(t), 3),
        }
        for name, t in times.items()
    }


def quiet(times: list[float]) -> float:
    """Return the tenth percentile: the time of a step while nothing else runs, which the median hides on a shared
    machine.
    """
    return statistics.quantiles(times, n=10)[0]


def check(work: Any, state: Trial, slots: list[int]) -> float:
    """Return the largest difference between any two variants' outputs."""
    outs = []
    for variant in (UNIFORM if len(set(slots)) == 1 else MIXED).values():
        what, extra = state.prepare(variant, slots)
        outs.append(work.compiled(what)(work.tokens, extra))
    return float(np.max([np.abs(np.array(o - outs[0])) for o in outs]))  # NaN when there is one


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.02, help="of one variant in one round")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--threads", type=int, default=0, help="of OpenBLAS")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--out", help="a JSON list of sessions, to which this one is added")
    args = parser.parse_args()
    blas = _blas()
    if args.threads and blas is not None:
        blas.openblas_set_num_threads(args.threads)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        **{name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "blas": _kernels(),
        "blas_threads": args.threads,
        "adapters": ADAPTERS,
        "rank": RANK,
        "command": " ".join(["python", *sys.argv]),
        "runs": [],
    }
    for name in args.models:
        model = build(SHAPES[name])
        state = Trial(model)
        small = [1 + i % ADAPTERS for i in range(16)]
        for slots in (sorted(small), [3] * 16):
            print(f"{name}: variants differ by at most {check(Prefill(model, state, 16, 1), state, slots):.1e}")

        def report(kind: str, rows: int, length: int, slots: list[int], got: dict[str, Any], name: str = name) -> None:
            mix = "uniform" if len(set(slots)) == 1 else "mixed"
            print(f"\n{name} {kind} {rows} x {length} {mix}")
            for variant, r in got.items():
                print(f"  {variant:24} {r['ms']:9.3f} ms   {r['speed_of_base']:.3f} of base")
            sys.stdout.flush()
            run = {"model": name, "kind": kind, "rows": rows, "length": length, "slots": mix, "variants": got}
            result["runs"].append(run)

        for rows in args.rows:
            work: Any = Decode(model, SHAPES[name], state, rows)
            for slots in ([3] * rows, sorted(1 + i % ADAPTERS for i in range(rows)))[: 1 + (rows > 1)]:
                got = trial(work, state, slots, args.variants, args.rounds, args.seconds)
                report("decode", rows, 1, slots, got)
        if not args.no_prefill:
            for rows, length in ((1, 64), (1, 512), (4, 64), (8, 32)):
                work = Prefill(model, state, rows, length)
                slots = [3] if rows == 1 else sorted(1 + i % ADAPTERS for i in range(rows))
                names = args.variants or (None if rows == 1 else PREFILL)
                got = trial(work, state, slots, names, max(args.rounds // 4, 4), args.seconds)
                report("prefill", rows, length, slots, got)
    if args.out:
        out = Path(args.out)
        sessions = json.loads(out.read_text()) if out.exists() else []
        out.write_text(json.dumps([*sessions, result], indent=1) + "\n")


if __name__ == "__main__":
    main()
