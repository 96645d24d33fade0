"""Choice of the attention back end: the fastest one that is right on this device for this model's layers.

Two decode steps are timed: many rows of short contexts, and one row of a long one. The division of the
kernels' work is the one with which both are fastest on this device. MLX's own attention is also timed over keys and
values that are contiguous for each row, as mlx-lm keeps them. A paged pool does not have contiguous keys; this time
tells users what the pool costs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlx_tandem.errors import ModelError
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import Rejected, checked
from mlx_tandem.model.ops.attention import cases, fused, portable
from mlx_tandem.model.ops.attention.cache import LayerKernels, PagedCache, PoolLayout, StepView
from mlx_tandem.model.ops.attention.division import Division, shorter, wider
from mlx_tandem.model.ops.attention.paged import MOST_QUERIES

log = logging.getLogger(__name__)

AUTO = "auto"
"""Name that asks for the fastest back end."""

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 4e-3}
"""Largest error by type, relative to the 2-norm of the result in float32. A wrong mask, table or head is off by a tenth
and more.
"""

CODED_TOLERANCE = 1e-2
"""Largest error where the cache holds few bits per number: the device may round a number to the neighbouring code, and
its kernels need not round decoded numbers to the model's type.
"""

STEPS = ((16, 1024), (1, 16384))
"""Rows and context of the decode steps that are timed: many short ones, and a long one, whose keys have to be split."""

CHAIN = 8
"""Timed calls in a row; each has the output of the one before as its queries."""

WORTHWHILE = 0.95
"""Share of the first division's time below which another one replaces it; timing noise is smaller than that."""

BEHIND = 1.1
"""Factor by which the chosen back end may take longer than attention over contiguous keys before the log warns."""

Seconds = Callable[[LayerShape, LayerKernels | None, int, int, int], float]
"""Function that times one layer's part of a decode step, given the shape of the layer, its kernels (None: the portable
back end), the block size, the rows and the context.
"""

Rival = Callable[[LayerShape, int, int], float]
"""Function that times MLX's attention over contiguous keys and values, given the shape of the layer, rows, context."""


class AttentionDivision(Struct, frozen=True, forbid_unknown_fields=True):
    """The attention back end, and how its work is divided for each kind of layer, in the order of their first layers.

    Kinds of layers whose keys its kernels cannot read are left out.
    """

    name: str
    reason: str
    divisions: tuple[Division, ...] = ()


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The back end that serves, and why."""

    name: str
    reason: str
    """A sentence for logs and reports, with the times that decided."""

    layers: tuple[LayerKernels | None, ...]
    """The kernels of each layer for few queries; None: the portable back end answers."""


def choose(
    asked: str,
    shapes: Sequence[LayerShape],
    block_size: int,
    windows: Sequence[int],
    candidates: Sequence[fused.Fused],
    seconds: Seconds | None = None,
    rival: Rival | None = None,
) -> AttentionChoice:
    """Return the attention back end for layers of these shapes.

    Args:
        asked: A back end's name, which is then used without timing it, or `auto` for the fastest.
        shapes: The shape of each layer.
        block_size: Positions per block of the KV pool.
        windows: The attention windows that the model's masks have.
        candidates: The fused back ends of this device, the preferred first.
        seconds: Times attention; by default on this device.
        rival: Times attention over contiguous keys; by default on this device.

    Raises:
        ModelError: The back end asked for does not exist here, cannot serve this model, or is wrong.
    """
    if not shapes:
        return AttentionChoice(portable.NAME, "the model has no attention", ())
    nothing: tuple[LayerKernels | None, ...] = (None,) * len(shapes)
    if asked == portable.NAME:
        return AttentionChoice(portable.NAME, "asked for", nothing)
    candidates = [c for c in candidates if asked in (AUTO, c.name)]
    reasons = [] if candidates else ["this device has no other" if asked == AUTO else "it needs another device"]
    kinds = _kinds(shapes)
    if candidates and not kinds:
        own = [fused.unreadable(s) if s.asks else "layers that compute attention by themselves" for s in shapes]
        reasons = [f"the model has {own[0]}"]
    timer = (seconds or _seconds) if asked == AUTO else None
    for candidate in candidates if kinds else ():
        kernels, reason = _try(candidate, kinds, block_size, windows, timer, rival or contiguous_seconds)
        if kernels:
            serving = tuple(kernels.get(s) if s.asks else None for s in shapes)
            return AttentionChoice(candidate.name, reason, serving)
        reasons.append(f"{candidate.name} is not used: {reason}")
    if asked != AUTO:
        raise ModelError(f"attention by {asked!r} is not possible: {'; '.join(reasons)}", param="attention_backend")
    return AttentionChoice(portable.NAME, "; ".join(reasons), nothing)


def described(choice: AttentionChoice) -> AttentionDivision:
    """Return a choice as plain data, from which `made` builds the same kernels."""
    kinds = {id(kernels): kernels for kernels in choice.layers if kernels is not None}
    divisions = tuple(kernels.attention.division for kernels in kinds.values())
    return AttentionDivision(choice.name, choice.reason, divisions)


def made(
    given: AttentionDivision, shapes: Sequence[LayerShape], block_size: int, candidates: Sequence[fused.Fused]
) -> AttentionChoice:
    """Return the back end that another process chose for layers of these shapes; `candidates` as for `choose`."""
    kernels: dict[LayerShape, LayerKernels] = {}
    if given.divisions:
        candidate = next(c for c in candidates if c.name == given.name)
        for kind, division in zip(_kinds(shapes), given.divisions, strict=True):
            kernels[kind] = candidate.kernels(kind, block_size, division)
    return AttentionChoice(given.name, given.reason, tuple(kernels.get(s) if s.asks else None for s in shapes))


def _kinds(shapes: Sequence[LayerShape]) -> list[LayerShape]:
    """Return the kinds of layers whose cache kernels can read, in the order of their first layers."""
    return [s for s in dict.fromkeys(shapes) if s.asks and not fused.unreadable(s)]


def _try(
    candidate: fused.Fused,
    kinds: Sequence[LayerShape],
    block_size: int,
    windows: Sequence[int],
    seconds: Seconds | None,
    rival: Rival,
) -> tuple[dict[LayerShape, LayerKernels], str]:
    """Return the candidate's kernels for each kind of layer and why they are used; without kernels, why they are not.

    Without `seconds` the kernels need not be faster than the portable back end. They need never be faster than `rival`.
    """

    def check() -> tuple[dict[LayerShape, LayerKernels], str]:
        kernels = {kind: _initial_kernels(candidate, kind, block_size) for kind in kinds}
        if problem := _problem(kernels, block_size, windows):
            raise Rejected(problem)
        if seconds is None:
            return kernels, "asked for"
        kernels, times = _divided(candidate, kernels, block_size, windows, seconds)
        portables = [sum(seconds(kind, None, block_size, *step) for kind in kinds) for step in STEPS]
        rivals = [sum(rival(kind, *step) for kind in kinds) for step in STEPS]
        figures = _figures(times, portables, rivals)
        if not math.prod(times) < math.prod(portables):
            raise Rejected(f"slower: {figures}")
        if any(ours > BEHIND * theirs for ours, theirs in zip(times, rivals, strict=True)):
            log.warning("attention by %s is slower than MLX's over contiguous keys: %s", candidate.name, figures)
        return kernels, f"faster: {figures}"

    return checked(f"attention by {candidate.name}", check, lambda reason: ({}, reason))


def _compile(kernels: LayerKernels, own: Sequence[cases.Case], *, grouped: bool = False) -> None:
    """Have all forms of the kernels for these cases compiled at once."""

    def calls() -> None:
        for case in own:
            cases.called(case, kernels, lambda *arrays: None, grouped=grouped)

    dialect.compile_together(calls)


def _initial_kernels(candidate: fused.Fused, kind: LayerShape, block_size: int) -> LayerKernels:
    """Return the kernels with the first division. The kernel for groups of rows is left out if it is wrong or fails."""
    kernels = candidate.kernels(kind, block_size)
    if kernels.grouped is None:
        return kernels

    def check() -> LayerKernels:
        own = list(_cases(kind, block_size, (), lengths=(2, 5)))
        _compile(kernels, own, grouped=True)
        for case in own:
            if problem := _error(case, cases.answer(case, kernels, grouped=True)):
                raise Rejected(problem)
        return kernels

    def without_groups(reason: str) -> LayerKernels:
        return candidate.kernels(kind, block_size, replace(kernels.attention.division, grouped=False))

    return checked(f"attention of groups of rows by {candidate.name}", check, without_groups)


def _better(
    candidate: fused.Fused,
    kind: LayerShape,
    block_size: int,
    windows: Sequence[int],
    seconds: Seconds,
    division: Division,
    best: Sequence[float],
) -> tuple[LayerKernels, list[float]] | None:
    """Return the kernels with this division and the seconds of each of STEPS; None if they are wrong, fail, or are not
    clearly faster than `best`.
    """

    def check() -> tuple[LayerKernels, list[float]] | None:
        made = candidate.kernels(kind, block_size, division)
        times = [seconds(kind, made, block_size, *step) for step in STEPS]
        if not math.prod(times) < WORTHWHILE ** len(STEPS) * math.prod(best):
            raise Rejected("not clearly faster")
        if problem := _problem({kind: made}, block_size, windows):
            raise Rejected(problem)
        return made, times

    return checked(f"attention divided by {division}", check, lambda reason: None)


def _divided(
    candidate: fused.Fused,
    attentions: dict[LayerShape, LayerKernels],
    block_size: int,
    windows: Sequence[int],
    seconds: Seconds,
) -> tuple[dict[LayerShape, LayerKernels], list[float]]:
    """Return the kernels with their work divided in the way that is fastest here, and the seconds of each of STEPS."""
    chosen: dict[LayerShape, LayerKernels] = {}
    totals = [0.0] * len(STEPS)
    for kind, first in attentions.items():
        division, kernels = first.attention.division, first
        best = [seconds(kind, kernels, block_size, *step) for step in STEPS]
        for others in (shorter, wider):
            for other in others(division, candidate.name, kind.keys):
                if better := _better(candidate, kind, block_size, windows, seconds, other, best):
                    division, (kernels, best) = other, better
        if kernels is not first:
            log.info("attention of %s numbers a head is divided by %s on this device", kind.keys.dim, division)
        chosen[kind] = kernels
        totals = [total + time for total, time in zip(totals, best, strict=True)]
    return chosen, totals


def _figures(times: Sequence[float], portables: Sequence[float], rivals: Sequence[float]) -> str:
    """Return the seconds of both back ends and those over contiguous keys in words, step by step."""
    return "; ".join(
        f"{ours * 1e6:.0f} µs a layer for {rows} x {context:,} tokens, {portable.NAME} takes {theirs * 1e6:.0f}, "
        f"contiguous keys {rival * 1e6:.0f}"
        for (rows, context), ours, theirs, rival in zip(STEPS, times, portables, rivals, strict=True)
    )


def _problem(attentions: dict[LayerShape, LayerKernels], block_size: int, windows: Sequence[int]) -> str:
    """Return what is wrong with the kernels' answers to random cases; empty if nothing is."""
    for shape, attention in attentions.items():
        own = list(_cases(shape, block_size, windows))
        _compile(attention, own)
        for case in own:
            if problem := _error(case, cases.answer(case, attention)):
                return problem
    return ""


def _error(case: cases.Case, answer: mx.array) -> str:
    """Return how wrong an answer to a case is; empty if it is right."""
    expected, got = np.array(cases.plain(case)), np.array(answer.astype(mx.float32))
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    right = error <= (CODED_TOLERANCE if case.bits else TOLERANCE[case.dtype])
    return "" if right else f"wrong by {error:.1e} in {case}"


def _cases(
    shape: LayerShape, block_size: int, windows: Sequence[int], lengths: Sequence[int] = (1, MOST_QUERIES)
) -> Iterator[cases.Case]:
    """Yield cases with rows of these lengths, by default one query and the most queries of a row, and with contexts
    that are read in one piece and in several.
    """
    form, asks = shape.keys, shape.asks
    assert asks is not None
    rng = np.random.default_rng(0)
    for window in (None, *windows):
        for length in lengths:
            for longest in (90, 700 + (window or 0)):
                yield cases.invent(
                    rng,
                    str(form.dtype).rpartition(".")[2],
                    (form.heads, asks.heads // form.heads, form.dim),
                    length=length,
                    rows=3,
                    block_size=block_size,
                    longest=longest,
                    window=window,
                    sinks=asks.sinks,
                    bits=form.bits,
                    grid=form.group or 64,
                )


def _seconds(shape: LayerShape, attention: LayerKernels | None, block_size: int, rows: int, context: int) -> float:
    """Return the seconds of one layer's part in a decode step without its products.

    That part is the write of the new positions, and attention.
    """
    form = shape.keys
    width = -(-context // block_size)
    blocks = 1 + rows * width
    pool = KVArrays([shape], blocks, block_size)
    cache = PagedCache(shape, attention)
    tables = 1 + np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    last = context - 1
    slots = (tables[:, last // block_size] * block_size + last % block_size)[:, None]
    view = StepView(
        mx.full((rows,), last, mx.int32),
        mx.array(slots),
        mx.array(tables),
        PoolLayout(blocks, block_size, mask_axes=1),
    )
    new = mx.random.normal((rows, form.heads, 1, form.dim)).astype(form.dtype)
    sinks = _sinks(shape)
    mx.eval(new)

    def attend(queries: mx.array) -> mx.array:
        cache.bind(pool.layers[0], view)
        keys, values = cache.update_and_fetch(new, new)
        queries = cache.attend(queries, keys, values, form.dim**-0.5, view.mask(1, None), sinks)
        del keys, values
        pool.layers = [cache.release()]
        return queries

    return _chained(shape, rows, attend)


def contiguous_seconds(shape: LayerShape, rows: int, context: int) -> float:
    """Return the seconds of MLX's attention of one layer over contiguous keys and values in the type of the model.

    Nothing is written, and no row is padded, so that a step of mlx-lm takes at least as long.
    """
    form = shape.keys
    keys, values = (mx.zeros((rows, form.heads, context, form.dim), form.dtype) for _ in range(2))
    sinks = _sinks(shape)
    mx.eval(keys, values)
    scale = form.dim**-0.5
    return _chained(
        shape,
        rows,
        lambda queries: mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, sinks=sinks),
    )


def _sinks(shape: LayerShape) -> mx.array | None:
    """Return attention sinks for a layer that asks for them."""
    asks = shape.asks
    return mx.zeros((asks.heads,), shape.keys.dtype) if asks is not None and asks.sinks else None


def _chained(shape: LayerShape, rows: int, attend: Callable[[mx.array], mx.array]) -> float:
    """Return the seconds of one call of `attend`, which takes and returns queries [rows, heads, 1, dim], in a chain."""
    form, asks = shape.keys, shape.asks
    assert asks is not None
    times = []
    for _ in range(5):
        queries = mx.random.normal((rows, asks.heads, 1, form.dim)).astype(form.dtype)
        mx.eval(queries)
        started = time.perf_counter()
        for _ in range(CHAIN):
            queries = attend(queries)
        mx.eval(queries)
        times.append((time.perf_counter() - started) / CHAIN)
    return min(times)
