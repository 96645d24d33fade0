"""The kernels of paged attention on the CPU, beside attention as it is written in books."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.dialect import Kernel, Source
from mlx_tandem.model.ops.attention.division import Division, start
from mlx_tandem.model.ops.attention.paged import EVERYTHING, PagedAttention, unreadable_rows
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")

TOLERANCE = {mx.float32: 1e-5, mx.float16: 1e-3, mx.bfloat16: 4e-3}


@dataclass(frozen=True)
class Kind:
    """What kernels are compiled for."""

    dtype: mx.Dtype
    dim: int
    group: int
    many: bool  # queries of a row
    bits: int = 0
    block: int = 16
    sinks: bool = False
    cap: float = 0.0

    def __str__(self) -> str:
        name = str(self.dtype).rpartition(".")[2]
        return f"{name}-{self.group}x{self.dim}-{'many' if self.many else 'one'}-{self.bits}bits-{self.block}"


KINDS = [
    Kind(mx.bfloat16, 128, 4, False),
    Kind(mx.bfloat16, 128, 4, True),
    Kind(mx.bfloat16, 128, 4, False, bits=8),
    Kind(mx.bfloat16, 64, 7, False, bits=4),
    Kind(mx.bfloat16, 256, 8, False, sinks=True),
    Kind(mx.bfloat16, 128, 8, False),
    Kind(mx.bfloat16, 64, 8, False, bits=8),
    Kind(mx.float32, 32, 8, False),
    Kind(mx.float16, 80, 2, False, block=8),
    Kind(mx.float16, 96, 1, True, bits=8, sinks=True),
    Kind(mx.float32, 16, 2, True, block=4),
    Kind(mx.float32, 128, 3, False, block=32, cap=3.0),
    Kind(mx.float32, 256, 1, True, block=12, sinks=True, cap=3.0),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 3),
    longest=st.sampled_from([1, 20, 300]),
    window=st.sampled_from([EVERYTHING, EVERYTHING, 1, 9, 100]),
    splits=st.sampled_from([0, 1, 2, 5]),
    warps=st.sampled_from([0, 1, 2]),
    depth=st.sampled_from([0, 3]),
    together=st.sampled_from([8, 8, 2]),
    narrow=st.booleans(),
    order=st.sampled_from(shim.ORDERS),
    more=st.sampled_from([None, 0, 25]),
)
# A split ends within a tile.
@example(
    seed=1,
    rows=2,
    longest=300,
    window=EVERYTHING,
    splits=2,
    warps=0,
    depth=3,
    together=8,
    narrow=True,
    order="together",
    more=None,
)
def test_it_is_attention(
    kind: Kind,
    seed: int,
    rows: int,
    longest: int,
    window: int,
    splits: int,
    warps: int,
    depth: int,
    together: int,
    narrow: bool,
    order: shim.Order,
    more: int | None,
) -> None:
    """`more`: how many positions beyond the window the tables keep; None: all."""
    rng = np.random.default_rng(seed)
    kv_heads, length = 2, int(rng.integers(2, 9)) if kind.many else 1
    form = RowFormat(kv_heads, kind.dim, kind.dtype, kind.bits, 32)
    offsets = rng.integers(0, longest, rows).astype(np.int32)
    width = -(-int(offsets.max() + length) // kind.block) + int(rng.integers(0, 3))
    blocks = 1 + rows * width
    tables = 1 + rng.permutation(rows * width).reshape(rows, width).astype(np.int32)
    # All of the pool is NaN but the rows' own keys and values, from the first block on that their tables keep.
    keeps = None if more is None or window == EVERYTHING else window + more
    first = np.maximum(offsets + 1 - (keeps or EVERYTHING), 0) // kind.block
    at = np.arange(width * kind.block)
    kept = np.zeros((blocks, kind.block), bool)
    for row in range(rows):
        own = (at < offsets[row] + length) & (at >= first[row] * kind.block)
        kept[tables[row, at // kind.block], at % kind.block] = own
    pool, halves = [], []
    for _ in range(2):
        numbers = rng.standard_normal((kv_heads, blocks, kind.block, kind.dim)).astype(np.float32)
        numbers[:, ~kept] = np.nan
        lines = form.encode(mx.array(numbers.reshape(-1, kind.dim)).astype(kind.dtype))
        pool += lines
        halves.append(np.array(form.decode(lines).astype(mx.float32)).reshape(numbers.shape))
    heads = kv_heads * kind.group
    queries = mx.array(rng.standard_normal((rows, heads, length, kind.dim)).astype(np.float32)).astype(kind.dtype)
    sinks = mx.array(rng.standard_normal(heads).astype(np.float32)).astype(kind.dtype) if kind.sinks else None
    # The last row is padding: it must come to no harm and do none.
    offsets[-1], tables[-1] = (0, 0) if rows > 1 else (offsets[-1], tables[-1])
    real = rows - 1 if rows > 1 else rows
    first = np.maximum(offsets + 1 - (keeps or EVERYTHING), 0) // kind.block
    begun = np.take_along_axis(np.pad(tables, ((0, 0), (0, width))), first[:, None] + np.arange(width), 1)
    for half in halves if keeps else ():  # what is not kept is not asked for, and NaN beside a weight of 0
        np.nan_to_num(half, copy=False)
    got = PagedAttention(shim.maker(order), form, kind.block, Division(396, together, depth, narrow=narrow))(
        queries,
        pool,
        mx.array(begun),
        mx.array(offsets),
        kind.dim**-0.5,
        window=window,
        kept=keeps,
        sinks=sinks,
        cap=kind.cap,
        splits=splits,
        warps=warps,
    )
    expected = plain(np.array(queries.astype(mx.float32)), halves, tables, offsets, window, sinks, kind.cap)[:real]
    given_ = np.array(got.swapaxes(1, 2).astype(mx.float32))[:real]
    tolerance = TOLERANCE[kind.dtype] * (1 + (kind.bits > 0))
    assert np.linalg.norm(given_ - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_metal_reads_keys_and_values_once_for_eight_queries(dtype: mx.Dtype, bits: int, dim: int) -> None:
    """Of one token, or of drafts: a KV head's queries are answered by one block of threads for each split."""
    form, launched = RowFormat(2, dim, dtype, bits, 32), []

    def make(source: Source) -> Kernel:
        def call(inputs: Any, template: Any, groups: Any, threads: int, outputs: Any) -> list[mx.array]:
            launched.append(groups)
            return [mx.zeros(shape, kind) for shape, kind in outputs]

        return call

    attention = PagedAttention(make, form, 16, start("metal", form))
    pool = [mx.zeros((2 * 16, width), kind) for _ in range(2) for width, kind in form.lines()]
    for group, length in ((8, 1), (4, 2), (2, 4), (1, 8)):
        queries = mx.zeros((3, 2 * group, length, dim), dtype)
        attention(queries, pool, mx.zeros((3, 1), mx.int32), mx.zeros((3,), mx.int32), 1.0, splits=1)
        assert launched.pop() == (form.heads, 3, 1)


def test_four_blocks_are_held_at_once_where_they_need_fewer_turns() -> None:
    """And the answers are the same, bit for bit."""
    device = Division(12, dense=True)
    assert [blocks for blocks in range(1, 40) if device.held(blocks) == 4] == [
        *range(13, 17),
        *range(25, 33),
        *range(37, 40),
    ]
    assert {replace(device, dense=False).held(blocks) for blocks in range(1, 40)} == {3}
    made: list[str] = []

    def make(source: Source) -> Kernel:
        kernel = shim.maker()(source)

        def call(*given: Any) -> list[mx.array]:
            made.append(source.name)
            return kernel(*given)

        return call

    rng = np.random.default_rng(3)
    form, rows = RowFormat(2, 64, mx.bfloat16, 0, 64), 7
    pool = [mx.array(rng.standard_normal((2 * 8 * 16, 64)).astype(np.float32)).astype(mx.bfloat16) for _ in range(2)]
    queries = mx.array(rng.standard_normal((rows, 4, 1, 64)).astype(np.float32)).astype(mx.bfloat16)
    tables, offsets = mx.array(1 + np.arange(rows, dtype=np.int32)[:, None]), mx.array(np.full(rows, 9, np.int32))
    each = [
        np.array(
            PagedAttention(make, form, 16, division)(queries, pool, tables, offsets, 0.1, splits=splits).view(mx.uint16)
        )
        for splits in (1, 2)
        for division in (replace(device, blocks=12 * splits), Division(12))
    ]
    assert made[::2] != made[1::2]
    assert [name for name in made if "dense" in name] == ["paged_attention_dense", "paged_attention_part_dense"]
    assert (each[0] == each[1]).all() and (each[2] == each[3]).all()


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("splits", [1, 2])
def test_the_result_has_the_shape_that_is_asked_for(length: int, splits: int) -> None:
    """The default shape is [rows, length, heads, dim], the order in memory."""
    rng = np.random.default_rng(length)
    form, rows, heads = RowFormat(2, 64, mx.float32), 3, 4
    pool = [mx.array(rng.standard_normal((2 * 8 * 16, 64)).astype(np.float32)) for _ in range(2)]
    queries = mx.array(rng.standard_normal((rows, heads, length, 64)).astype(np.float32))
    tables, offsets = mx.array(1 + np.arange(rows, dtype=np.int32)[:, None]), mx.array([9, 0, 12], mx.int32)
    attention = PagedAttention(shim.maker(), form, 16, start("cuda", form))
    plainly = attention(queries, pool, tables, offsets, 0.1, splits=splits)
    assert plainly.shape == (rows, length, heads, 64)
    for shape in ((rows, length, heads * 64), (rows * length, heads * 64)):
        shaped = attention(queries, pool, tables, offsets, 0.1, splits=splits, shape=shape)
        assert mx.array_equal(shaped, plainly.reshape(shape)) and shaped.shape == shape


@pytest.mark.parametrize("splits", [1, 2])
def test_a_kernel_has_no_array_that_its_layer_does_not_need(splits: int) -> None:
    """Only a layer with a window gets `windows`. Only the kernel that normalises the softmax gets `sinks`."""
    made: list[Source] = []

    def make(source: Source) -> Kernel:
        made.append(source)
        return shim.maker()(source)

    form, heads = RowFormat(2, 64, mx.float32), 4
    pool = [mx.zeros((2 * 4 * 16, 64)) for _ in range(2)]
    queries, tables, offsets = mx.zeros((1, heads, 1, 64)), mx.array([[1, 2]], mx.int32), mx.array([20], mx.int32)
    attention = PagedAttention(make, form, 16, start("cuda", form))
    found = []
    for window in (EVERYTHING, 9):
        for sinks in (None, mx.zeros((heads,))):
            for _ in range(2):  # the second call makes no kernel
                attention(queries, pool, tables, offsets, 0.1, window=window, sinks=sinks, splits=splits)
            found.append([[name for name in source.inputs if name in ("windows", "sinks")] for source in made])
            made.clear()
    if splits == 1:
        assert found == [[[]], [["sinks"]], [["windows"]], [["windows", "sinks"]]]
    else:  # kernels for a part are made once for layers with sinks and without them
        assert found == [[[], []], [["sinks"]], [["windows"], ["windows"]], [["windows", "sinks"]]]


def plain(
    queries: np.ndarray,
    halves: list[np.ndarray],
    tables: np.ndarray,
    offsets: np.ndarray,
    window: int,
    sinks: mx.array | None,
    cap: float,
) -> np.ndarray:
    rows, heads, length, dim = queries.shape
    kv_heads = len(halves[0])
    expected = np.zeros(queries.shape)
    for row in range(rows):
        stop = offsets[row] + length
        keys, values = (
            h[:, tables[row]].reshape(kv_heads, -1, dim)[:, :stop].repeat(heads // kv_heads, 0) for h in halves
        )
        scores = queries[row].astype(np.float64) @ keys.swapaxes(1, 2) * dim**-0.5
        scores = cap * np.tanh(scores / cap) if cap else scores
        key, query = np.arange(keys.shape[1])[None], offsets[row] + np.arange(length)[:, None]
        weights = np.exp(np.where((key <= query) & (key > query - window), scores, -np.inf))
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(np.array(sinks.astype(mx.float32), np.float64))[:, None, None]
        expected[row] = weights @ values / total
    return expected


def test_the_largest_scores_and_the_smallest() -> None:
    """A later key may outweigh everything so far, by more than an exponent holds."""
    form = RowFormat(1, 16, mx.float32)
    keys = np.zeros((64, 16), np.float32)
    keys[:, 0] = np.linspace(-900, 900, 64) * np.resize([1, -1], 64)
    values = np.eye(64, 16, dtype=np.float32) + np.arange(64)[:, None]
    attention = PagedAttention(shim.maker(), form, 16, start("cuda", form))
    queries = mx.zeros((1, 1, 1, 16)).at[..., 0].add(1.0)
    tables, offsets = mx.array([[0, 1, 2, 3]], mx.int32), mx.array([63], mx.int32)
    for scale in (1.0, 1e-3):
        weights = np.exp(scale * (keys[:, 0] - keys[:, 0].max()).astype(np.float64))
        expected = weights @ values / weights.sum()
        got = attention(queries, [mx.array(keys), mx.array(values)], tables, offsets, scale)
        assert np.allclose(np.array(got)[0, 0, 0], expected, rtol=1e-5)


def test_a_number_that_is_not_finite_reaches_its_own_row_only() -> None:
    form = RowFormat(1, 16, mx.float32)
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((3 * 16, 16)).astype(np.float32) for _ in range(2))
    keys[16:32] = np.inf
    values[16:32] = np.nan
    attention = PagedAttention(shim.maker(), form, 16, start("cuda", form))
    queries = mx.ones((2, 1, 1, 16))
    got = attention(
        queries,
        [mx.array(keys), mx.array(values)],
        mx.array([[1], [2]], mx.int32),
        mx.array([15, 15], mx.int32),
        0.25,
    )
    assert np.isnan(np.array(got[0])).all() and np.isfinite(np.array(got[1])).all()


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (RowFormat(1, 128, mx.float32, 8, 64), ""),
        (RowFormat(1, 112, mx.float32), ""),
        (RowFormat(1, 512, mx.float32), "heads of 512 numbers"),
        (RowFormat(1, 72, mx.float32), "heads of 72 numbers"),
        (RowFormat(1, 80, mx.float32, 8, 32), "40 cached numbers on a grid"),
    ],
)
def test_what_cannot_be_read_is_refused(form: RowFormat, why: str) -> None:
    assert unreadable_rows(form) == why
    if why:
        with pytest.raises(ValueError, match=why):
            PagedAttention(shim.maker(), form, 16, start("cuda", form))
