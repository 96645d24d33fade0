"""What goes from the product of q, k and v to attention, beside MLX's own norm, rotation and writing of the pool."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.kernels.dialect import Kernel, Source
from mlx_tandem.model.ops.attention.rotary import Norms, Rotary
from tests.kernels import shim

pytestmark = pytest.mark.skipif(shim.COMPILER is None, reason="needs g++")
BLOCKS, BLOCK, EPSILON, BASE = 6, 4, 1e-5, 10_000.0
TOLERANCE = {mx.float32: 2e-6, mx.bfloat16: 2e-2, mx.float16: 4e-3}


@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "kv_heads", "bits", "normed", "rotated", "gated"),
    [
        (mx.float32, 128, 4, 2, 0, True, 128, False),
        (mx.float32, 80, 3, 3, 0, False, 80, False),
        (mx.bfloat16, 64, 4, 1, 0, True, 64, False),
        (mx.float16, 96, 2, 2, 0, True, 96, False),
        (mx.float32, 128, 2, 1, 8, True, 128, False),
        (mx.float32, 64, 2, 2, 4, False, 64, False),
        (mx.bfloat16, 80, 2, 1, 8, True, 80, False),
        (mx.bfloat16, 256, 2, 1, 0, True, 64, True),
        (mx.float32, 64, 4, 2, 4, True, 24, True),
        (mx.float32, 128, 2, 1, 8, False, 32, True),
        (mx.float16, 64, 2, 2, 0, False, 16, False),
    ],
)
def test_it_equals_the_operations_it_stands_for(
    dtype: mx.Dtype, dim: int, heads: int, kv_heads: int, bits: int, normed: bool, rotated: int, gated: bool
) -> None:
    rng = np.random.default_rng(dim + bits)
    rows, length = 3, 2
    form = RowFormat(kv_heads, dim, dtype, bits, 32)
    pool = KVArrays([LayerShape(form, form)], BLOCKS, BLOCK).layers[0]
    old = [np.array(a.view(mx.uint16)) for a in pool]
    joined = bits != 8
    x = mx.array(rng.standard_normal((rows, length, (heads + 2 * kv_heads) * dim)).astype(np.float32)).astype(dtype)
    queries, others = mx.split(x, [heads * dim], axis=-1)
    if gated:
        own = queries.reshape(rows, length, heads, dim)
        queries = mx.concatenate([own, 7 * mx.ones_like(own)], axis=-1).reshape(rows, length, -1)
    products = [queries, *mx.split(others, 2, axis=-1)]
    offsets = np.array([3, 0, 40], np.int32)
    slots = np.array([[7, 8], [13, 1], [21, 22]], np.int32)  # 1 lies in the scratch block: padding
    frequency = BASE ** (-np.arange(rotated // 2) / (rotated // 2))
    angle = ((offsets[:, None] + np.arange(length))[..., None] * frequency).astype(np.float32)
    weights = [mx.array(rng.uniform(0.5, 1.5, dim).astype(np.float32)).astype(dtype) for _ in range(2)]

    got = Rotary(shim.maker(), form, BLOCK)(
        [mx.concatenate(products, axis=-1)] if joined else products,
        mx.stack([mx.cos(mx.array(angle)), mx.sin(mx.array(angle))]),
        mx.array(slots),
        pool,
        norms=Norms(mx.stack(weights), EPSILON) if normed else None,
        fetched=True,
        gated=gated,
    )

    q, k, v = mx.split(x.reshape(rows, length, -1, dim), [heads, heads + kv_heads], axis=2)
    if normed:
        q, k = (mx.fast.rms_norm(a, w, EPSILON) for a, w in zip((q, k), weights, strict=True))
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    where: Any = mx.array(offsets)
    q, k = (mx.fast.rope(a, rotated, traditional=False, base=BASE, scale=1.0, offset=where) for a in (q, k))
    real = mx.array(slots >= BLOCK)[:, None, :, None]
    k, v = mx.where(real, k, 0), mx.where(real, v, 0)
    lines = [form.encode(a.reshape(-1, dim)) for a in (k, v)]
    k, v = (form.decode(own).reshape(a.shape) for own, a in zip(lines, (k, v), strict=True))
    step = 0.03 if bits == 8 else 0.5 if bits else 0.0  # a number on the edge may go either way
    for ours, theirs, allowed in zip(got, (q, k, v), (0.0, step, step), strict=True):
        assert ours.shape == theirs.shape
        error = np.abs(np.array((ours - theirs).astype(mx.float32)))
        assert error.max() <= TOLERANCE[dtype] * 4 + allowed
        assert np.median(error) <= TOLERANCE[dtype]

    # The pool holds just what was fetched, at the slots, and nothing else has changed.
    flat = (np.arange(kv_heads)[None, :, None] * BLOCKS * BLOCK + slots[:, None]).reshape(-1)
    half = len(pool) // 2
    for own, fetched in ((pool[:half], got[1]), (pool[half:], got[2])):
        stored = form.decode([array[mx.array(flat)] for array in own]).reshape(fetched.shape)
        assert mx.array_equal(stored, fetched)
    for before, array in zip(old, pool, strict=True):
        rest = np.delete(np.arange(len(before)), flat)
        assert (np.array(array.view(mx.uint16))[rest] == before[rest]).all()


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_all_forms_do_the_same_and_have_no_arrays_that_they_do_not_need(bits: int, normed: bool) -> None:
    """For one product or three, with the new keys and values or without them, with an axis of tokens or without."""
    made: list[Source] = []

    def make(source: Source) -> Kernel:
        made.append(source)
        return shim.maker()(source)

    rng = np.random.default_rng(bits)
    heads, kv_heads, dim, rows = 4, 2, 64, 3
    form = RowFormat(kv_heads, dim, mx.float32, bits, 32)
    rotary = Rotary(make, form, BLOCK)
    x = mx.array(rng.standard_normal((rows, 1, (heads + 2 * kv_heads) * dim)).astype(np.float32))
    parts = [mx.contiguous(part) for part in mx.split(x, [heads * dim, (heads + kv_heads) * dim], axis=-1)]
    norms = Norms(mx.array(rng.uniform(0.5, 1.5, (2, dim)).astype(np.float32)), EPSILON) if normed else None
    angles = mx.array(rng.uniform(-1, 1, (2, rows, 1, dim // 2)).astype(np.float32))

    def run(products: list[mx.array], fetched: bool) -> tuple[list[mx.array], list[mx.array]]:
        pool = KVArrays([LayerShape(form, form)], BLOCKS, BLOCK).layers[0]
        slots = mx.array([[7], [13], [22]], mx.int32)
        return rotary(products, angles, slots, pool, norms=norms, fetched=fetched), pool

    (queries, keys, values), pool = run([x], True)
    for products, fetched in [([x], False), (parts, True), (parts, False), ([x[:, 0]], False)]:
        got, written = run(products, fetched)
        expected = [queries, keys, values] if fetched else [queries]
        for ours, theirs in zip([*got, *written], [*expected, *pool], strict=True):
            assert mx.array_equal(ours, theirs)
    more = int(normed) + len(pool)
    assert [(len(source.inputs), len(source.outputs)) for source in made] == [
        (3 + more, 3),
        (3 + more, 1),
        (5 + more, 3),
        (5 + more, 1),
    ]
    assert len({source.name for source in made}) == 4
