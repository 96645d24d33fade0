"""Which back end of attention serves: the fastest of those that are right on this device, for this model's layers.

Two decode steps are timed: many rows of short contexts, and one row of a long one. The kernels' work is divided as
suits both best on this device.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_tandem.errors import ModelError
from mlx_tandem.model.attention import fused, portable
from mlx_tandem.model.cache.blocks import KVArrays
from mlx_tandem.model.cache.kvcache import LayerKernels, LayerShape, PagedCache, StepView
from mlx_tandem.model.kernels.division import shorter, start, wider
from mlx_tandem.model.kernels.paged_attention import MOST_QUERIES
from mlx_tandem.model.trials import attention as trial

log = logging.getLogger(__name__)

AUTO = "auto"

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 4e-3}
"""Of the 2-norm of attention in float32. A wrong mask, table or head is off by a tenth and more."""

CODED_TOLERANCE = 1e-2
"""Of a cache of few bits: the device may round a number to the code beside, and its kernels need not round what a code
stands for to the model's type."""

STEPS = ((16, 1024), (1, 16384))
"""Rows and context of the decode steps that are timed: many short ones, and a long one, whose keys have to be split."""

CHAIN = 8
"""Calls of attention that are timed together, each with the output of the one before as its queries."""

WORTHWHILE = 0.95
"""Share of the first division's time below which another one takes its place; timing alone differs by less."""

Seconds = Callable[[LayerShape, LayerKernels | None, int, int, int], float]
"""What times one layer's part of a decode step, of (shape, attention, block size, rows, context)."""


@dataclass(frozen=True, slots=True)
class Choice:
    name: str
    reason: str  # for people: the figures that decided
    layers: tuple[LayerKernels | None, ...]  # what answers each layer's few queries; None: portable does


def choose(
    asked: str,
    shapes: Sequence[LayerShape],
    block_size: int,
    windows: Sequence[int],
    candidates: Sequence[fused.Fused],
    seconds: Seconds | None = None,
) -> Choice:
    """Return what answers the layers' queries.

    Args:
        asked: A back end's name, which is then taken unless it is wrong, or `auto` for the fastest.
        shapes: What each layer keeps.
        block_size: Positions of a block of the pool.
        windows: The windows of the model's masks.
        candidates: Back ends beside the portable one, the preferred first.
        seconds: What times an attention; by default the clock of this device.

    Raises:
        ModelError: A back end that was asked for is not there, cannot serve this model or is wrong.
    """
    seconds = seconds or _seconds
    nothing: tuple[LayerKernels | None, ...] = (None,) * len(shapes)
    if asked == portable.NAME:
        return Choice(portable.NAME, "asked for", nothing)
    candidates = [c for c in candidates if asked in (AUTO, c.name)]
    reasons = [] if candidates else ["this device has no other" if asked == AUTO else "it needs another device"]
    kinds = [s for s in dict.fromkeys(shapes) if s.asks and not fused.unreadable(s)]
    if candidates and not kinds:
        own = [fused.unreadable(s) if s.asks else "layers that compute attention by themselves" for s in shapes]
        reasons = [f"the model has {own[0]}"]
    for candidate in candidates if kinds else ():
        try:
            attentions = {kind: candidate.kernels(kind, block_size) for kind in kinds}
            problem = _problem(attentions, block_size, windows)
            if not problem and asked == AUTO:
                attentions, times = _divided(candidate, attentions, block_size, windows, seconds)
                portables = [sum(seconds(kind, None, block_size, *step) for kind in kinds) for step in STEPS]
                figures = _figures(times, portables)
                problem = "" if math.prod(times) < math.prod(portables) else f"slower: {figures}"
        except Exception as e:
            log.warning("attention by %s failed its check", candidate.name, exc_info=True)
            problem = f"{type(e).__name__}: {e}".strip()[:500]
        if not problem:
            serving = tuple(attentions.get(s) if s.asks else None for s in shapes)
            return Choice(candidate.name, "asked for" if asked != AUTO else f"faster: {figures}", serving)
        reasons.append(f"{candidate.name} is not taken: {problem}")
    if asked != AUTO:
        raise ModelError(f"attention by {asked!r} is not possible: {'; '.join(reasons)}", param="attention_backend")
    return Choice(portable.NAME, "; ".join(reasons), nothing)


def _divided(
    candidate: fused.Fused,
    attentions: dict[LayerShape, LayerKernels],
    block_size: int,
    windows: Sequence[int],
    seconds: Seconds,
) -> tuple[dict[LayerShape, LayerKernels], list[float]]:
    """Return the kernels with their work divided as is fastest here, and the seconds that each of STEPS takes then."""
    chosen: dict[LayerShape, LayerKernels] = {}
    totals = [0.0] * len(STEPS)
    for kind, first in attentions.items():
        division, kernels = start(candidate.name, kind.keys), first
        best = [seconds(kind, kernels, block_size, *step) for step in STEPS]
        for others in (shorter, wider):
            for other in others(division, candidate.name, kind.keys):
                made = candidate.kernels(kind, block_size, other)
                times = [seconds(kind, made, block_size, *step) for step in STEPS]
                faster = math.prod(times) < WORTHWHILE ** len(STEPS) * math.prod(best)
                if faster and not _problem({kind: made}, block_size, windows):
                    division, kernels, best = other, made, times
        if kernels is not first:
            log.info("attention of %s numbers a head is divided by %s on this device", kind.keys.dim, division)
        chosen[kind] = kernels
        totals = [total + time for total, time in zip(totals, best, strict=True)]
    return chosen, totals


def _figures(times: Sequence[float], portables: Sequence[float]) -> str:
    """Return the seconds of both sides in words, step by step."""
    return "; ".join(
        f"{ours * 1e6:.0f} µs a layer for {rows} x {context:,} tokens, {portable.NAME} takes {theirs * 1e6:.0f}"
        for (rows, context), ours, theirs in zip(STEPS, times, portables, strict=True)
    )


def _problem(attentions: dict[LayerShape, LayerKernels], block_size: int, windows: Sequence[int]) -> str:
    """What is wrong with the answers to random questions; empty: nothing."""
    for shape, attention in attentions.items():
        for case in _cases(shape, block_size, windows):
            expected = np.array(trial.plain(case))
            got = np.array(trial.answer(case, attention).astype(mx.float32))
            error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
            if not error <= (CODED_TOLERANCE if case.bits else TOLERANCE[case.dtype]):
                return f"wrong by {error:.1e} in {case}"
    return ""


def _cases(shape: LayerShape, block_size: int, windows: Sequence[int]) -> Iterator[trial.Case]:
    """As many queries as rows have, and contexts that are read in one piece and in several."""
    form, asks = shape.keys, shape.asks
    assert asks is not None
    rng = np.random.default_rng(0)
    for window in (None, *windows):
        for length in (1, MOST_QUERIES):
            for longest in (90, 700 + (window or 0)):
                yield trial.invent(
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
    """Return the time of one layer's part in a decode step without its products: writing what is new, and attention."""
    form, asks = shape.keys, shape.asks
    assert asks is not None
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
        num_blocks=blocks,
        block_size=block_size,
        mask_axes=1,
    )
    new = mx.random.normal((rows, form.heads, 1, form.dim)).astype(form.dtype)
    sinks = mx.zeros((asks.heads,), form.dtype) if asks.sinks else None
    times = []
    for _ in range(5):
        queries = mx.random.normal((rows, asks.heads, 1, form.dim)).astype(form.dtype)
        mx.eval(queries, new)
        started = time.perf_counter()
        for _ in range(CHAIN):
            cache.bind(pool.layers[0], view)
            keys, values = cache.update_and_fetch(new, new)
            queries = cache.attend(queries, keys, values, form.dim**-0.5, view.mask(1, None), sinks)
            del keys, values
            pool.layers = [cache.release()]
        mx.eval(queries)
        times.append((time.perf_counter() - started) / CHAIN)
    return min(times)
