"""Random cases of paged attention and the right answers to them: lengths, tables, windows, head groups and types
vary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.ops.attention import fused, portable
from mlx_tandem.model.ops.attention.cache import LayerKernels, PagedCache, PoolLayout, StepView

TYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Largest error by type, relative to the largest number of the result. A wrong mask, table or head is off by a tenth
and more."""


@dataclass(frozen=True)
class Case:
    """One step of attention: each row has `starts` tokens in the pool and attends with `length` new tokens.

    Shapes: queries [rows, heads, length, dim]; keys and values [rows, kv heads, positions, dim], of which a row uses
    as many positions as it has tokens; tables [rows, blocks].
    """

    dtype: str
    queries: mx.array
    keys: mx.array
    values: mx.array
    starts: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    block_size: int
    window: int | None
    sinks: mx.array | None
    bits: int
    """Bits of a cached number; 0: numbers are cached in their own type."""

    grid: int = 64
    """Numbers that share one quantisation grid, at least."""

    @property
    def scale(self) -> float:
        """The factor of the scores: one by the square root of the head dimension."""
        return float(np.sqrt(1.0 / self.queries.shape[-1]))

    @property
    def shape(self) -> LayerShape:
        """The layer shape that the paged cache is made for."""
        form = RowFormat(self.keys.shape[1], self.keys.shape[3], self.keys.dtype, self.bits, self.grid)
        return LayerShape(form, form)

    def __str__(self) -> str:
        rows, heads, length, dim = self.queries.shape
        more = [f"window {self.window}"] * (self.window is not None) + ["sinks"] * (self.sinks is not None)
        more += [f"{self.bits} bits"] * bool(self.bits)
        return ", ".join(
            [f"{rows} rows of {length}", f"{heads}/{self.keys.shape[1]} heads of {dim}", self.dtype, *more]
        )


Backend = Callable[[Case], mx.array]
"""Function that computes the attention of a case: [rows, heads, length, dim]."""


def draw(seed: int) -> Case:
    """Return the case of this number, the same one every time."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.choice([1, 2, 3, 4])), int(rng.choice([1, 2, 4, 7]))
    return invent(
        rng,
        list(TYPES)[seed % len(TYPES)],
        (kv_heads, group, int(rng.choice([64, 80, 96, 128, 256]))),
        length=int(rng.choice([1, 1, 2, 5, 8, 19])),
        rows=int(rng.integers(1, 6)),
        block_size=int(rng.choice([4, 8, 16, 32])),
        window=int(rng.integers(1, 60)) if seed % 5 in (1, 2) else None,
        sinks=seed % 7 == 3,
        bits=8 if seed % 4 == 1 else 0,
    )


def invent(
    rng: np.random.Generator,
    dtype: str,
    heads: tuple[int, int, int],
    *,
    length: int,
    rows: int,
    block_size: int,
    longest: int = 150,
    window: int | None = None,
    sinks: bool = False,
    bits: int = 0,
    grid: int = 64,
) -> Case:
    """Return a random case.

    Args:
        rng: The source of random numbers.
        dtype: A key of TYPES.
        heads: KV heads, queries' heads for each of them, and numbers per head.
        length: New tokens of each row.
        rows: The number of rows.
        block_size: Positions per block.
        longest: Upper bound of the tokens that a row has before the new ones.
        window: Positions that a query sees, or None for all.
        sinks: Whether the layer has attention sinks.
        bits: Bits of a cached number; 0: its own type.
        grid: Numbers that share one quantisation grid.
    """
    kv_heads, group, dim = heads
    starts = rng.integers(0, longest, rows).astype(np.int32)
    width = -(-int(starts.max() + length) // block_size)
    tables = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)

    def numbers(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(TYPES[dtype])

    return Case(
        dtype,
        numbers(rows, kv_heads * group, length, dim),
        numbers(rows, kv_heads, int(starts.max()) + length, dim),
        numbers(rows, kv_heads, int(starts.max()) + length, dim),
        starts,
        tables,
        block_size,
        window,
        numbers(kv_heads * group) if sinks else None,
        bits,
        grid,
    )


def plain(case: Case) -> mx.array:
    """Return attention by its definition, one row after the other, in float32 and without a pool.

    It is computed on the CPU, since a GPU may round the factors of float32 products.
    """
    with mx.stream(mx.cpu):
        return _plain(case)


def _plain(case: Case) -> mx.array:
    heads, length = case.queries.shape[1:3]
    kv_heads, dim = case.keys.shape[1], case.keys.shape[3]
    outputs = []
    for row, start in enumerate(case.starts.tolist()):

        def seen(x: mx.array, form: RowFormat, row: int = row, positions: int = start + length) -> mx.array:
            kept = x[row, :, :positions].reshape(-1, dim)
            kept = form.decode(form.encode(kept)).reshape(kv_heads, positions, dim)
            return mx.repeat(kept.astype(mx.float32), heads // kv_heads, axis=0)

        keys, values = seen(case.keys, case.shape.keys), seen(case.values, case.shape.values)
        scores = (case.queries[row].astype(mx.float32) * case.scale) @ keys.swapaxes(-1, -2)
        key = np.arange(start + length)[None]
        query = start + np.arange(length)[:, None]
        hidden = (key > query) | (key <= query - (case.window or start + length))
        weights = mx.exp(mx.where(mx.array(hidden), -mx.inf, scores))
        total = weights.sum(-1, keepdims=True)
        if case.sinks is not None:
            total = total + mx.exp(case.sinks.astype(mx.float32))[:, None, None]
        outputs.append((weights / total) @ values)
    return mx.stack(outputs)


def answer(case: Case, attention: LayerKernels | None = None, *, grouped: bool = False) -> mx.array:
    """Return attention as the engine computes it: the context is written into blocks of a pool, then the new tokens
    attend.

    With `attention`, its kernels answer what they can. grouped: whether each new token is a row of its own, as in steps
    that verify drafts.
    """
    output = called(case, attention, mx.eval, grouped=grouped)
    mx.eval(output)
    return output


def called(
    case: Case, attention: LayerKernels | None, write: Callable[..., None], *, grouped: bool = False
) -> mx.array:
    """Return what `answer` does, not yet computed; `write` computes the arrays into which the context is written."""
    rows, heads, length, dim = case.queries.shape
    block = case.block_size
    blocks = 1 + case.tables.size
    cache = PagedCache(case.shape, attention)
    pool = KVArrays([case.shape], blocks, block)

    def view(positions: npt.NDArray[np.int32], real: npt.NDArray[np.bool_]) -> StepView:
        tables = case.tables.repeat(len(positions) // rows, 0)
        at = tables[np.arange(len(tables))[:, None], np.where(real, positions, 0) // block] * block + positions % block
        offset, slots = positions[:, 0].astype(np.int32), np.where(real, at, 0).astype(np.int32)
        first = np.maximum(offset + 1 - (case.window or 1 << 30), 0) // block  # the first block that a row sees
        seen = np.take_along_axis(
            np.pad(tables, ((0, 0), (0, int(first.max())))), first[:, None] + np.arange(tables.shape[1]), 1
        )
        return StepView(
            mx.array(offset),
            mx.array(slots),
            mx.array(seen),
            PoolLayout(blocks, block, mask_axes=1, kept=case.window),
        )

    if before := int(case.starts.max()):
        at = np.broadcast_to(np.arange(before, dtype=np.int32), (rows, before))
        cache.bind(pool.layers[0], view(at, at < case.starts[:, None]))
        write(cache.update_and_fetch(case.keys[:, :, :before], case.values[:, :, :before]))
        pool.layers = [cache.release()]
    positions = (case.starts[:, None] + np.arange(length)).astype(np.int32)
    new = mx.array(positions)[:, None, :, None]
    queries, (keys, values) = case.queries, (mx.take_along_axis(x, new, axis=2) for x in (case.keys, case.values))
    if grouped:
        positions = positions.reshape(-1, 1)
        queries, keys, values = (mx.expand_dims(x.swapaxes(1, 2).flatten(0, 1), 2) for x in (queries, keys, values))
    step = view(positions, np.ones_like(positions, np.bool_))
    step.each = length if grouped else 1
    cache.bind(pool.layers[0], step)
    seen = cache.update_and_fetch(keys, values)
    output = cache.attend(queries, *seen, case.scale, step.mask(queries.shape[2], case.window), case.sinks)
    if grouped:
        output = output.reshape(rows, length, heads, dim).swapaxes(1, 2)
    cache.release()
    return output


def by(backend: fused.Fused) -> Backend:
    """Return the function that answers cases by this back end, and by `portable` where its kernels cannot read the
    cache.
    """

    def answered(case: Case) -> mx.array:
        readable = not fused.unreadable(case.shape)
        return answer(case, backend.kernels(case.shape, case.block_size) if readable else None)

    return answered


FUSED: dict[str, Backend] = {b.name: by(b) for b in fused.available()}
BACKENDS: dict[str, Backend] = {portable.NAME: answer, **FUSED}
"""All back ends of this device by name."""


@dataclass(frozen=True)
class Worst:
    """The largest error of a back end in one type, relative to the largest number of the result, and the case that
    had it.
    """

    error: float
    case: str
    allowed: float


def worst(backend: Backend, cases: int) -> dict[str, Worst]:
    """Return the worst of this many random cases for each type. A result that is not finite has an infinite error."""
    found: dict[str, Worst] = {}
    for seed in range(cases):
        case = draw(seed)
        expected = np.array(plain(case))
        got = np.array(backend(case).astype(mx.float32))
        error = float(np.abs(got - expected).max() / np.abs(expected).max()) if np.isfinite(got).all() else np.inf
        if case.dtype not in found or error > found[case.dtype].error:
            found[case.dtype] = Worst(error, str(case), TOLERANCE[case.dtype])
    return found
