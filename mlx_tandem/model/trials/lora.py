"""Fused kernels for adapters beside plain products on this device: whether they are right, and when faster."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlx_tandem.config import LoraConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.lora import MOST_MEMBERS, LoraKernels, fits
from mlx_tandem.model.linears.groups import Group, find_groups
from mlx_tandem.model.lora.grouped import GroupedDeltas
from mlx_tandem.model.lora.routes import Ints, cut_tiles
from mlx_tandem.model.trials.machine import seconds

log = logging.getLogger(__name__)

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 8e-3}
"""Of the largest number of a result; twice what rounding it takes in the short types."""
UNLIMITED = 1 << 30

Floats = npt.NDArray[np.float32]

_TOKENS = (1, 16, 64, 256, 1024, 4096)
_MOST_BYTES = 1 << 30  # of what the linears of a layer give out
_TIMED_RANK = 16
_TIMED_SLOTS = 8


class Shape(NamedTuple):
    """The linears of one input."""

    inputs: int
    outputs: tuple[int, ...]


class Choice(NamedTuple):
    fused: GroupedDeltas | None  # None: plain products are taken
    reason: str  # for people


def choose(
    model: nn.Module, config: LoraConfig, dtype: mx.Dtype, makers: Sequence[dialect.Make] | None = None
) -> Choice:
    """Whether this model's adapters go through fused kernels, and up to how many tokens of a step. Kernels of every
    shape in use are compiled here, and not while serving. `makers`: for the targets of this device, if not its own.

    Raises ModelError when the configuration asks for kernels that are not to be had or are wrong.
    """
    forced = config.backend == "fused"
    if config.max_loras == 0:
        return Choice(None, "no adapter can be loaded")
    if not (forced or config.backend == "auto"):
        return Choice(None, "asked for")
    if makers is None:
        makers = [dialect.maker(target) for target in dialect.available()]
    if not makers:
        return _plain("this device has no fused kernels", forced)
    groups = find_groups(model)
    shapes = sorted({s for group in groups for s in _shapes(group)})
    if not shapes:
        return _plain("no linear has a shape for fused kernels", forced)
    mixed = same = UNLIMITED
    try:
        kernels = LoraKernels(makers[0])
        problem = wrong(kernels, shapes, dtype)
        if not problem and not forced:
            mixed, same = (faster_up_to(kernels, shapes, dtype, slots=slots) for slots in (_TIMED_SLOTS, 1))
            problem = "" if mixed else "slower"
    except Exception as e:  # whatever a compiler or a driver says
        log.warning("fused kernels for adapters failed their check", exc_info=True)
        problem = f"{type(e).__name__}: {e}".strip()[:500]
    mx.clear_cache()
    if problem:
        return _plain(f"fused kernels are not taken: {problem}", forced)
    limits = f"faster, for one adapter up to {_tokens(same)} a step, for several up to {_tokens(mixed)}"
    return Choice(GroupedDeltas(kernels, groups, same=same, mixed=mixed), "asked for" if forced else limits)


def _plain(reason: str, forced: bool) -> Choice:
    if forced:
        raise ModelError(f"adapters by fused kernels are not possible: {reason}", param="lora_backend")
    return Choice(None, reason)


def _tokens(count: int) -> str:
    return "any number of tokens" if count == UNLIMITED else f"{count} tokens"


def _shapes(group: Group) -> Iterable[Shape]:
    """Of the group, and of as many of its first members as an adapter may leave: each number has kernels of its own."""
    own = [t.shape for t in group if not t.shape.experts and fits(t.shape.inputs, t.shape.outputs)][:MOST_MEMBERS]
    return [Shape(own[0].inputs, tuple(s.outputs for s in own[: n + 1])) for n in range(len(own))]


# --- right ----------------------------------------------------------------------------------------------------------


def wrong(kernels: LoraKernels, shapes: Sequence[Shape], dtype: mx.Dtype) -> str:
    """What is wrong with the kernels on random data; empty: nothing."""
    for seed, shape in enumerate(shapes):
        for rank in (8, 16):
            error = _error(kernels, shape, rank, dtype, seed)
            if not error <= TOLERANCE[dtype]:
                return f"wrong by {error:.1e} in {shape.inputs} → {shape.outputs}, rank {rank}"
    return ""


def _error(kernels: LoraKernels, shape: Shape, rank: int, dtype: mx.Dtype, seed: int) -> float:
    rng = np.random.default_rng(seed)
    slots = np.sort(rng.integers(0, 4, 21))
    x, a, b, y = _arrays(shape, rank, 3, len(slots), dtype)
    tiles = mx.array(cut_tiles(slots, 1), mx.int32)
    ends = (0, *accumulate(shape.outputs))
    ways = kernels.add(x, tiles, a, b, y), kernels.add(x, tiles, a, b, [mx.concatenate(y, -1)], ends)
    deltas = [expected(x, *member, slots) for member in zip(a, b, strict=True)]
    return max(far(*results) for added in ways for results in zip(added, y, deltas, strict=True))


def far(got: mx.array, own: mx.array, delta: Floats) -> float:
    """How far `got` is from own + delta, of the largest number of that; infinitely where it is no number."""
    want = floats(own) + delta
    error = float(np.abs(floats(got) - want).max() / np.abs(want).max())
    return error if np.isfinite(error) else np.inf


def expected(x: mx.array, a: mx.array, b: mx.array, slots: Ints) -> Floats:
    """x @ a[slot] @ b[slot] for x [tokens, 1, inputs], in float32 on the host: a GPU may round what it multiplies."""
    wide = floats(x)
    delta = np.zeros((*x.shape[:2], b.shape[2]), np.float32)
    for slot in np.unique(slots):
        rows = slots == slot
        delta[rows] = wide[rows] @ floats(a[int(slot)]) @ floats(b[int(slot)])
    return delta


def floats(array: mx.array) -> Floats:
    return np.array(array.astype(mx.float32))


def _arrays(
    shape: Shape, rank: int, slots: int, tokens: int, dtype: mx.Dtype
) -> tuple[mx.array, list[mx.array], list[mx.array], list[mx.array]]:
    """x [tokens, 1, inputs], and for each member A, B (zeros in slot 0) and its own outputs."""

    seeds = count()

    def numbers(*dims: int, scale: float = 1.0) -> mx.array:
        return (mx.random.normal(dims, key=mx.random.key(next(seeds))) * scale).astype(dtype)

    def stacked(*dims: int) -> mx.array:
        return mx.concatenate([mx.zeros((1, *dims), dtype), numbers(slots, *dims, scale=dims[0] ** -0.5)])

    a = [stacked(shape.inputs, rank) for _ in shape.outputs]
    b = [stacked(rank, n) for n in shape.outputs]
    arrays = numbers(tokens, 1, shape.inputs), a, b, [numbers(tokens, 1, n) for n in shape.outputs]
    mx.eval(arrays)
    return arrays


# --- faster ---------------------------------------------------------------------------------------------------------


def faster_up_to(kernels: LoraKernels, shapes: Sequence[Shape], dtype: mx.Dtype, *, slots: int) -> int:
    """The most tokens of a step, in so many slots, that the kernels take no longer for than the products they would
    replace; for fewer they are faster, too. 0: for none."""
    largest = [
        s for s in shapes if not any(s != t and s == Shape(t.inputs, t.outputs[: len(s.outputs)]) for t in shapes)
    ]
    won = 0
    for tokens in _TOKENS:
        if tokens < slots:
            continue
        if tokens * dtype.size * sum(sum(s.outputs) for s in largest) > _MOST_BYTES:
            return won
        fused, plain = np.sum([_times(kernels, shape, dtype, tokens, slots) for shape in largest], 0)
        if fused > plain:
            return won
        won = tokens
    return UNLIMITED


def _times(kernels: LoraKernels, shape: Shape, dtype: mx.Dtype, tokens: int, slots: int) -> tuple[float, float]:
    """Seconds of the kernels and of the products that do the same."""
    x, a, b, y = _arrays(shape, _TIMED_RANK, slots, tokens, dtype)
    owner = np.sort(1 + np.arange(tokens) % slots)
    tiles = mx.array(cut_tiles(owner, 1), mx.int32)
    ids, order = mx.array(owner, mx.uint32), mx.arange(tokens, dtype=mx.uint32)

    def product(a: mx.array, b: mx.array, y: mx.array) -> mx.array:
        if slots == 1:
            return mx.addmm(y[:, 0], x[:, 0] @ a[1], b[1])
        u = mx.gather_mm(x, a, lhs_indices=order, rhs_indices=ids)
        return y + mx.gather_mm(u, b, lhs_indices=order, rhs_indices=ids)

    fused = seconds(lambda: kernels.add(x, tiles, a, b, y))
    return fused, seconds(lambda: [product(*member) for member in zip(a, b, y, strict=True)])
