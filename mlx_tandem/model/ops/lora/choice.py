"""Check of the fused LoRA kernels: they must agree with plain products, and are used for as many tokens as they win.

`choose` runs at start where adapters are configured. Elsewhere `choosing` runs piece by piece between the steps of the
server, before the first adapter is served. The first half of this module compares results, the second times both ways.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlx_tandem.config import LoraConfig
from mlx_tandem.errors import ModelError
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import (
    TOLERANCE,
    Choice,
    Pieces,
    Rejected,
    checked_in_pieces,
    finish,
    floats,
    makers_of_device,
    seconds,
)
from mlx_tandem.model.ops.lora.kernel import MOST_MEMBERS, Form, GroupedDeltas, LoraKernels, fits, forms_of
from mlx_tandem.model.ops.lora.routes import Ints, cut_tiles
from mlx_tandem.model.targets import Group, find_groups

log = logging.getLogger(__name__)

UNLIMITED = 1 << 30
"""Number of tokens that stands for "any number"."""

Floats = npt.NDArray[np.float32]

_TOKENS = (1, 16, 64, 256, 1024, 4096)
"""Tokens per step that are timed, in this order."""

_MOST_BYTES = 1 << 30
"""Timing ends where the outputs of a layer's linears exceed so many bytes."""

_TIMED_RANK = 16
_TIMED_SLOTS = 8


class AdapterLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """The most tokens for which fused kernels compute adapters: of one adapter, and of several; 0: never."""

    reason: str
    same: int = 0
    mixed: int = 0


class Shape(NamedTuple):
    """Sizes of the linears that share one input: the number of inputs, and the outputs of each linear."""

    inputs: int
    outputs: tuple[int, ...]


Forms = Mapping[Shape, Collection[Form]]
"""The forms in which kernels may be called, by shape."""


def can_wait(model: nn.Module, config: LoraConfig) -> bool:
    """Return whether there are kernels to choose that nothing needs before the first adapter is loaded."""
    if config.prepare or config.max_loras == 0 or config.backend != "auto" or not makers_of_device(None):
        return False
    return bool(_forms(find_groups(model)))


def choose(
    model: nn.Module, config: LoraConfig, dtype: mx.Dtype, makers: Sequence[dialect.Make] | None = None
) -> Choice[GroupedDeltas | None]:
    """Return the fused kernels for this model's adapters with the numbers of tokens up to which they are faster.

    None stands for plain products. Kernels of every shape in use are compiled here and not while serving. `makers`
    defaults to the makers of kernels for this device.

    Raises:
        ModelError: The configuration asks for fused kernels, which this device does not have or computes wrongly.
    """
    return finish(choosing(model, config, dtype, makers))


def choosing(
    model: nn.Module,
    config: LoraConfig,
    dtype: mx.Dtype,
    makers: Sequence[dialect.Make] | None = None,
    most_bytes: int = _MOST_BYTES,
) -> Pieces[Choice[GroupedDeltas | None]]:
    """Do what `choose` does, piece by piece, and time nothing with outputs of more than `most_bytes`."""
    forced = config.backend == "fused"
    if config.max_loras == 0:
        return Choice(None, "no adapter can be loaded")
    if not (forced or config.backend == "auto"):
        return Choice(None, "asked for")
    makers = makers_of_device(makers)
    if not makers:
        return _plain("this device has no fused kernels", forced)
    groups = find_groups(model)
    forms = _forms(groups)
    if not forms:
        return _plain("no linear has a shape for fused kernels", forced)

    def check() -> Pieces[Choice[GroupedDeltas | None]]:
        kernels = LoraKernels(makers[0])
        if problem := (yield from _checking(kernels, forms, dtype)):
            raise Rejected(problem)
        if forced:
            return Choice(GroupedDeltas(kernels, groups, same=UNLIMITED, mixed=UNLIMITED), "asked for")
        mixed = yield from _timing(kernels, forms, dtype, _TIMED_SLOTS, most_bytes)
        same = yield from _timing(kernels, forms, dtype, 1, most_bytes)
        if not mixed:
            raise Rejected("slower")
        limits = f"faster, for one adapter up to {_tokens(same)} a step, for several up to {_tokens(mixed)}"
        return Choice(GroupedDeltas(kernels, groups, same=same, mixed=mixed), limits)

    return (
        yield from checked_in_pieces(
            "the fused LoRA kernels", check(), lambda reason: _plain(f"fused kernels are not used: {reason}", forced)
        )
    )


def described(choice: Choice[GroupedDeltas | None]) -> AdapterLimits:
    """Return the choice of the kernels of adapters as plain data."""
    deltas = choice.chosen
    return AdapterLimits(choice.reason) if deltas is None else AdapterLimits(choice.reason, deltas.same, deltas.mixed)


def made(model: nn.Module, same: int, mixed: int) -> GroupedDeltas:
    """Return the fused kernels for so many tokens, which another process has checked."""
    return GroupedDeltas(LoraKernels(makers_of_device(None)[0]), find_groups(model), same=same, mixed=mixed)


def confirming(
    model: nn.Module, dtype: mx.Dtype, known: Choice[GroupedDeltas | None]
) -> Pieces[Choice[GroupedDeltas | None] | None]:
    """Return what an earlier start has chosen, `known`, or None if its kernels are wrong by now, checked piece by
    piece.
    """
    deltas = known.chosen
    if deltas is None:
        return known
    check = _checking(deltas.kernels, _forms(find_groups(model)), dtype)
    problem = yield from checked_in_pieces("the fused LoRA kernels", check, lambda reason: reason)
    if problem:
        log.warning("the fused LoRA kernels are checked anew, because with the choices of the last start %s", problem)
    return None if problem else known


def _plain(reason: str, forced: bool) -> Choice[GroupedDeltas | None]:
    """Return the choice of plain products; raise ModelError if the configuration has `forced` the fused kernels."""
    if forced:
        raise ModelError(f"adapters by fused kernels are not possible: {reason}", param="lora_backend")
    return Choice(None, reason)


def _tokens(count: int) -> str:
    """Return a number of tokens in words."""
    return "any number of tokens" if count == UNLIMITED else f"{count} tokens"


def _forms(groups: Iterable[Group]) -> Forms:
    """Return the shapes of groups and of their first members alone, ascending, with the forms that each may take.

    An adapter may leave out the last members of a group, and each number of members has kernels of its own.
    """
    found: dict[Shape, set[Form]] = {}
    for group in groups:
        own = tuple(t for t in group if not t.shape.experts and fits(t.shape.inputs, t.shape.outputs))[:MOST_MEMBERS]
        for n in range(1, 1 + len(own)):
            shape = Shape(own[0].shape.inputs, tuple(t.shape.outputs for t in own[:n]))
            found.setdefault(shape, set()).update(forms_of(own, n))
    return dict(sorted(found.items()))


# --- Are the kernels right? ------------------------------------------------------------------------------------------


def wrong(kernels: LoraKernels, forms: Forms, dtype: mx.Dtype) -> str:
    """Return what is wrong with the kernels' results on random data; empty if nothing is."""
    return finish(_checking(kernels, forms, dtype))


def _checking(kernels: LoraKernels, forms: Forms, dtype: mx.Dtype) -> Pieces[str]:
    """Do what `wrong` does, a shape and a rank at a time.

    Each rank has kernels of its own, which take the device's compiler long. So one shape is checked at a second rank,
    the one with most linears, whose kernels contain what those of fewer have.
    """
    longest = max(forms, key=lambda shape: len(shape.outputs))
    for seed, (shape, own) in enumerate(forms.items()):
        for rank in (8, 16) if shape == longest else (16,):
            error = _error(kernels, shape, own, rank, dtype, seed)
            if not error <= TOLERANCE[dtype]:
                return f"wrong by {error:.1e} in {shape.inputs} → {shape.outputs}, rank {rank}"
            yield
    return ""


def wrong_in_any_shape(model: nn.Module, deltas: GroupedDeltas, dtype: mx.Dtype) -> str:
    """Return what is wrong with the kernels of a model's adapters; empty if nothing is."""
    return wrong(deltas.kernels, _forms(find_groups(model)), dtype)


def _error(kernels: LoraKernels, shape: Shape, forms: Collection[Form], rank: int, dtype: mx.Dtype, seed: int) -> float:
    """Return the kernels' largest error for this shape and rank, relative to the largest number of the result."""
    rng = np.random.default_rng(seed)
    slots = np.sort(rng.integers(0, 4, 21))
    x, a, b, y = _arrays(shape, rank, 3, len(slots), dtype)
    tiles = mx.array(cut_tiles(slots, 1), mx.int32)
    ends = (0, *accumulate(shape.outputs))
    whole = mx.concatenate(y, -1)
    ways = [kernels.add(x, tiles, a, b, y)] if "apart" in forms else []
    if "joined" in forms:
        ways.append(kernels.add(x, tiles, a, b, [whole], ends))
    if "whole" in forms:
        sums = kernels.add_joined(x, tiles, a, b, whole)
        ways.append([sums[..., start:end] for start, end in pairwise(ends)])
    deltas = [expected(x, *member, slots) for member in zip(a, b, strict=True)]
    return max(far(*results) for added in ways for results in zip(added, y, deltas, strict=True))


def far(got: mx.array, own: mx.array, delta: Floats) -> float:
    """Return the largest error of `got` against own + delta, relative to their largest number; infinity where it is
    NaN.
    """
    want = floats(own) + delta
    error = float(np.abs(floats(got) - want).max() / np.abs(want).max())
    return error if np.isfinite(error) else np.inf


def expected(x: mx.array, a: mx.array, b: mx.array, slots: Ints) -> Floats:
    """Return x @ a[slot] @ b[slot] for x [tokens, 1, inputs] in float32.

    It is computed on the host, since a GPU may round the factors of a product.
    """
    wide = floats(x)
    delta = np.zeros((*x.shape[:2], b.shape[2]), np.float32)
    for slot in np.unique(slots):
        rows = slots == slot
        delta[rows] = wide[rows] @ floats(a[int(slot)]) @ floats(b[int(slot)])
    return delta


def _arrays(
    shape: Shape, rank: int, slots: int, tokens: int, dtype: mx.Dtype
) -> tuple[mx.array, list[mx.array], list[mx.array], list[mx.array]]:
    """Return x [tokens, 1, inputs], and for each member its stacked A and B (zeros in slot 0) and its own outputs."""
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


# --- Are they faster? ------------------------------------------------------------------------------------------------


def _timing(kernels: LoraKernels, forms: Forms, dtype: mx.Dtype, slots: int, most_bytes: int) -> Pieces[int]:
    """Return the largest number of tokens per step for which the kernels take no longer than the products they
    replace, a shape and a number of tokens at a time.

    The tokens are spread over `slots` adapters. For fewer tokens the kernels are faster, too. Return 0 if they never
    are, UNLIMITED if they are for every number whose outputs have at most `most_bytes` bytes.
    """
    largest = [s for s in forms if not any(s != t and s == Shape(t.inputs, t.outputs[: len(s.outputs)]) for t in forms)]
    won = 0
    for tokens in _TOKENS:
        if tokens < slots:
            continue
        if tokens * dtype.size * sum(sum(s.outputs) for s in largest) > most_bytes:
            return won
        fused = plain = 0.0
        for shape in largest:
            own, theirs = _times(kernels, shape, forms[shape], dtype, tokens, slots)
            fused, plain = fused + own, plain + theirs
            yield
        if fused > plain:
            return won
        won = tokens
    return UNLIMITED


def _times(
    kernels: LoraKernels, shape: Shape, forms: Collection[Form], dtype: mx.Dtype, tokens: int, slots: int
) -> tuple[float, float]:
    """Return the seconds of the kernels, in a form that is used, and those of the products that compute the same."""
    x, a, b, y = _arrays(shape, _TIMED_RANK, slots, tokens, dtype)
    owner = np.sort(1 + np.arange(tokens) % slots)
    tiles = mx.array(cut_tiles(owner, 1), mx.int32)
    ids, order = mx.array(owner, mx.uint32), mx.arange(tokens, dtype=mx.uint32)

    def product(a: mx.array, b: mx.array, y: mx.array) -> mx.array:
        if slots == 1:
            return mx.addmm(y[:, 0], x[:, 0] @ a[1], b[1])
        u = mx.gather_mm(x, a, lhs_indices=order, rhs_indices=ids)
        return y + mx.gather_mm(u, b, lhs_indices=order, rhs_indices=ids)

    plain = seconds(lambda: [product(*member) for member in zip(a, b, y, strict=True)])
    if "apart" not in forms:
        y = [mx.concatenate(y, -1)]
        mx.eval(y)
    return seconds(lambda: kernels.add(x, tiles, a, b, y)), plain
