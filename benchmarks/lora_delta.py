"""Which formulation of the LoRA delta is fastest, measured in whole compiled steps.

    python benchmarks/lora_delta.py [--models 0.13M 4M] [--rows 1 8 16 64] [--rounds 5] [--out FILE]

Every variant runs in the same process on the same random model, interleaved round by round, and what is printed is
the median of the rounds' ratios to the base step of the same round: other load on the machine hits all alike.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

try:
    _blas = ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)  # before MLX: its own BLAS is a reference one
except OSError:
    _blas = None

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlx_tandem.adapters.formats import AdapterWeights, LinearShape
from mlx_tandem.config import LoraConfig
from mlx_tandem.model import lora
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


def build(shape: dict[str, int]) -> nn.Module:
    args = qwen3.ModelArgs.from_dict(
        {"model_type": "qwen3", "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 1e4,
         "tie_word_embeddings": True, **shape}
    )  # fmt: skip
    mx.random.seed(0)
    model = qwen3.Model(args)
    weights = [
        (k, mx.ones_like(v) if v.ndim == 1 else mx.random.normal(v.shape) * v.shape[-1] ** -0.5)
        for k, v in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model


def random_adapter(linears: dict[str, LinearShape], rank: int, seed: int) -> AdapterWeights:
    g = np.random.default_rng(seed)
    tensors = {
        path: (
            (g.standard_normal((s.inputs, rank)) * s.inputs**-0.5).astype(np.float32),
            (g.standard_normal((rank, s.outputs)) * rank**-0.5 * 0.1).astype(np.float32),
        )
        for path, s in linears.items()
    }
    return AdapterWeights(AdapterInfo(f"{seed}", rank, 1.0, "peft", (), 0), tensors)


# --- the variants ------------------------------------------------------------------------------------------------
#
# prepare(state, slots) -> arrays of the step (beside the stacked ones), made on the host, outside the compiled step
# delta(x, y, a, b, extra, i) -> y + delta, inside it; a and b are the module's stacked arrays, i its number

Prepare = Callable[["Trial", Sequence[int]], list[mx.array]]
Delta = Callable[[mx.array, mx.array, mx.array, mx.array, list[mx.array], int], mx.array]


def ids(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    return [mx.array(list(slots), mx.uint32)]


def one(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    return [mx.array([slots[0]], mx.uint32)]


def own_slot(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """The slot's own A and B of every module, as views."""
    return [x[slots[0]] for x in state.arrays()]


def take_addmm(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return mx.addmm(y, x @ a[extra[0][0]], b[extra[0][0]])


def one_gather(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    u = mx.gather_mm(x.reshape(1, -1, x.shape[-1]), a, rhs_indices=extra[0])
    return y + mx.gather_mm(u, b, rhs_indices=extra[0]).reshape(y.shape)


def own_addmm(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return mx.addmm(y, x @ extra[2 * i], extra[2 * i + 1])


def own_add(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return y + (x @ extra[2 * i]) @ extra[2 * i + 1]


def gather(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return y + mx.gather_mm(mx.gather_mm(x, a, rhs_indices=extra[0]), b, rhs_indices=extra[0])


def take_matmul(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return y + (x @ a[extra[0]]) @ b[extra[0]]


def dense_slots(state: Trial, slots: Sequence[int]) -> list[mx.array]:
    """Masked dense, its weights laid out beforehand for just the slots of the batch."""
    used = sorted(set(slots))
    key = ("dense", *used)
    if key not in state.cache:
        made = []
        for n, x in enumerate(state.arrays()):
            x = x[mx.array(used)]
            x = x.transpose(1, 0, 2).reshape(x.shape[1], -1) if n % 2 == 0 else x.reshape(-1, x.shape[-1])
            made.append(mx.contiguous(x))
        mx.eval(made)
        state.cache[key] = made
    mask = np.repeat(np.array(slots)[:, None] == np.array(used)[None], state.rank, 1)[:, None]
    return [*state.cache[key], mx.array(mask.astype(np.float32))]


def masked(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    return mx.addmm(y, (x @ extra[2 * i]) * extra[-1], extra[2 * i + 1])


def tiles(size: int) -> Prepare:
    def prepare(state: Trial, slots: Sequence[int]) -> list[mx.array]:
        perm, back, owner = tile(slots, size)
        return [mx.array(perm), mx.array(back), mx.array(owner.astype(np.uint32))]

    return prepare


def tile(slots: Sequence[int], size: int) -> tuple[Any, Any, Any]:
    """Rows dealt into tiles of `size` rows of one slot: the row of each place, each row's place, each tile's slot."""
    s = np.array(slots)
    perm, back, owner = [], np.zeros(len(s), np.int32), []
    for slot in np.unique(s):
        rows = np.flatnonzero(s == slot)
        back[rows] = np.arange(len(rows)) + len(perm)
        count = -(-len(rows) // size)
        perm += list(rows) + [rows[-1]] * (count * size - len(rows))
        owner += [slot] * count
    return np.array(perm, np.int32), back, np.array(owner)


def tiled(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    perm, back, owner = extra
    u = x.reshape(-1, x.shape[-1])[perm].reshape(owner.shape[0], -1, x.shape[-1])
    d = mx.gather_mm(mx.gather_mm(u, a, rhs_indices=owner), b, rhs_indices=owner)
    return y + d.reshape(-1, d.shape[-1])[back].reshape(y.shape)


def windows(size: int) -> Prepare:
    """As tiles, with the rows of the batch already in order of their slots: a tile is a window on x, not a copy."""

    def prepare(state: Trial, slots: Sequence[int]) -> list[mx.array]:
        s = np.array(slots)
        assert (np.diff(s) >= 0).all()
        first, back, owner = [], np.zeros(len(s), np.int32), []
        for slot in np.unique(s):
            rows = np.flatnonzero(s == slot)
            for at in range(0, len(rows), size):
                start = min(rows[at], len(s) - size)
                back[rows[at : at + size]] = rows[at : at + size] - start + len(first) * size
                first.append(start)
                owner.append(slot)
        return [mx.array(np.array(first, np.uint32)), mx.array(back), mx.array(np.array(owner, np.uint32)),
                mx.zeros((size,))]  # fmt: skip

    return prepare


def windowed(x, y, a, b, extra, i):  # type: ignore[no-untyped-def]
    first, back, owner, size = extra
    rows, width, n = x.size // x.shape[-1], x.shape[-1], size.shape[0]
    w = mx.as_strided(x, (rows - n + 1, n, width), (width, width, 1))
    d = mx.gather_mm(mx.gather_mm(w, a, lhs_indices=first, rhs_indices=owner), b, rhs_indices=owner)
    return y + d.reshape(-1, d.shape[-1])[back].reshape(y.shape)


UNIFORM: dict[str, tuple[Prepare, Delta]] = {
    "take + addmm": (one, take_addmm),
    "one gather_mm": (one, one_gather),
    "own arrays, addmm": (own_slot, own_addmm),
    "own arrays, add": (own_slot, own_add),
}
MIXED: dict[str, tuple[Prepare, Delta]] = {
    "gather_mm": (ids, gather),
    "take + matmul": (ids, take_matmul),
    "masked dense": (dense_slots, masked),
    "tiles of 2": (tiles(2), tiled),
    "tiles of 4": (tiles(4), tiled),
    "tiles of 8": (tiles(8), tiled),
    "windows of 4": (windows(4), windowed),
    "windows of 8": (windows(8), windowed),
}


class Trial(lora.LoraState):
    """A LoraState whose modules use the variant under trial."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, LoraConfig(max_loras=16), mx.float32)
        self.cache: dict[Any, list[mx.array]] = {}
        self.delta: Delta | None = None
        self.extra: list[mx.array] = []
        for slot in range(1, ADAPTERS + 1):
            self.install(slot, random_adapter(self.linears(), RANK, slot))
        self.number = {id(t): i for i, t in enumerate(self._active)}

    def use(self, delta: Delta | None, arrays: list[mx.array], extra: list[mx.array]) -> None:
        self.delta, self.extra, self.now = delta, extra, arrays

    def dense(self, t: Any, x: mx.array, y: mx.array) -> mx.array:
        if self.delta is None:
            return y
        i = self.number[id(t)]
        return self.delta(x, y, self.now[2 * i], self.now[2 * i + 1], self.extra, i)


# --- whole steps -------------------------------------------------------------------------------------------------


class Paged:
    """One layer of a head-major paged pool, as the engine's: [heads * blocks * BLOCK, d], rows through tables."""

    def __init__(self, heads: int, blocks: int, dim: int) -> None:
        self.heads, self.blocks, self.dim = heads, blocks, dim

    def bind(self, k: mx.array, v: mx.array, offset: mx.array, write: mx.array, table: mx.array, mask: Any) -> None:
        self.k, self.v, self.offset, self.write, self.table, self.mask = k, v, offset, write, table, mask

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.mask

    def update_and_fetch(self, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        self.k[self.write] = k.reshape(-1, self.dim)
        self.v[self.write] = v.reshape(-1, self.dim)
        return self.read(self.k), self.read(self.v)

    def read(self, pool: mx.array) -> mx.array:
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

    def compiled(self, delta: Delta | None) -> Callable[..., Any]:
        def step(tokens, k, v, offset, write, table, arrays, extra):  # type: ignore[no-untyped-def]
            self.state.use(delta, arrays, extra)
            mask = (mx.arange(CONTEXT) <= offset[:, None])[:, None, None]
            for layer, lk, lv in zip(self.layers, k, v, strict=True):
                layer.bind(lk, lv, offset, write, table, mask)
            logits = self.model(tokens[:, None], cache=self.layers)[:, -1]
            self.state.use(None, [], [])
            return mx.argmax(logits, -1).astype(mx.int32), [x.k for x in self.layers], [x.v for x in self.layers]

        return mx.compile(step)

    def run(self, fn: Callable[..., Any], arrays: list[mx.array], extra: list[mx.array], steps: int) -> float:
        """Seconds a step."""
        previous = None
        begin = time.perf_counter()
        for _ in range(steps):
            out, self.k, self.v = fn(
                self.tokens, self.k, self.v, self.offset, self.write, self.table, arrays, extra
            )
            mx.async_eval(out, self.k, self.v)
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

    def compiled(self, delta: Delta | None) -> Callable[..., Any]:
        def step(tokens, arrays, extra):  # type: ignore[no-untyped-def]
            self.state.use(delta, arrays, extra)
            logits = self.model.model(tokens)[:, -1]
            self.state.use(None, [], [])
            return logits

        return mx.compile(step)

    def run(self, fn: Callable[..., Any], arrays: list[mx.array], extra: list[mx.array], steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            mx.eval(fn(self.tokens, arrays, extra))
        return (time.perf_counter() - begin) / steps


def trial(
    work: Any, state: Trial, slots: list[int], names: Sequence[str] | None, rounds: int, seconds: float
) -> dict[str, Any]:
    variants: dict[str, tuple[Callable[..., Any], list[mx.array], list[mx.array]]] = {
        "base": (work.compiled(None), [], [])
    }
    table = UNIFORM if len(set(slots)) == 1 else MIXED
    arrays = state.arrays()
    for name, (prepare, delta) in table.items():
        if names and name not in names:
            continue
        try:
            extra = prepare(state, slots)
        except (AssertionError, ValueError):
            continue
        mx.eval(extra)
        needs = [] if delta in (own_addmm, own_add, masked) else arrays
        if not needs:  # the module's numbering needs their places
            needs = [mx.zeros(())] * len(arrays)
        variants[name] = (work.compiled(delta), needs, extra)
    times: dict[str, list[float]] = {name: [] for name in variants}
    once = {}
    for name, v in variants.items():
        work.run(*v, 4)
        once[name] = work.run(*v, 4)
    steps = max(3, int(seconds / max(once.values())))
    for _ in range(rounds):
        for name, v in variants.items():
            times[name].append(work.run(*v, steps))
    return {
        name: {
            "ms": round(statistics.median(t) * 1e3, 4),
            "speed_of_base": round(statistics.median(b / x for b, x in zip(times["base"], t, strict=True)), 3),
        }
        for name, t in times.items()
    }


def check(work: Any, state: Trial, slots: list[int]) -> float:
    """Greatest difference between any two variants' outputs, on a prefill."""
    outs = []
    for prepare, delta in (UNIFORM if len(set(slots)) == 1 else MIXED).values():
        try:
            extra = prepare(state, slots)
        except (AssertionError, ValueError):
            continue
        outs.append(work.compiled(delta)(work.tokens, state.arrays(), extra))
    return max(mx.abs(o - outs[0]).max().item() for o in outs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.15, help="of one variant in one round")
    parser.add_argument("--variants", nargs="+")
    parser.add_argument("--threads", type=int, default=0, help="of OpenBLAS")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args()
    if args.threads and _blas is not None:
        _blas.openblas_set_num_threads(args.threads)
    result: dict[str, Any] = {
        "machine": f"{platform.machine()} {platform.system()}",
        "mlx": mx.__version__,
        "mlx_lm": mlx_lm.__version__,
        "openblas": _blas is not None,
        "adapters": ADAPTERS,
        "rank": RANK,
        "command": " ".join(sys.argv),
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
                print(f"  {variant:20} {r['ms']:9.3f} ms   {r['speed_of_base']:.3f} of base")
            sys.stdout.flush()
            run = {"model": name, "kind": kind, "rows": rows, "length": length, "slots": mix, "variants": got}
            result["runs"].append(run)

        for rows in args.rows:
            work = Decode(model, SHAPES[name], state, rows)
            for slots in ([3] * rows, sorted(1 + i % ADAPTERS for i in range(rows))):
                if rows == 1 and slots[0] == 1:
                    continue
                got = trial(work, state, slots, args.variants, args.rounds, args.seconds)
                report("decode", rows, 1, slots, got)
        if not args.no_prefill:
            for rows, length in ((1, 64), (1, 512), (4, 64), (8, 32)):
                work = Prefill(model, state, rows, length)
                slots = [3] if rows == 1 else sorted(1 + i % ADAPTERS for i in range(rows))
                names = args.variants or (None if rows == 1 else ["gather_mm", "take + matmul", "masked dense"])
                got = trial(work, state, slots, names, args.rounds, args.seconds)
                report("prefill", rows, length, slots, got)
    if args.out:
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")


if __name__ == "__main__":
    main()
