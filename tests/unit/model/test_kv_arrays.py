"""Blocks of the pool as bytes and as copies: every bit comes back, and other blocks are untouched."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays

BLOCKS, BLOCK = 7, 4


def make(bits: int, dtype: mx.Dtype, seed: int = 0) -> KVArrays:
    """Two layers of unlike widths, every bit of them random."""
    shapes = [
        LayerShape(RowFormat(2, 12, dtype), RowFormat(2, 8, dtype)),
        LayerShape(RowFormat(1, 33, dtype), RowFormat(3, 16, dtype)),
    ]
    if bits:
        shapes = [s.quantised(bits, 8) for s in shapes]
    pool = KVArrays(shapes, BLOCKS, BLOCK)
    rng = np.random.default_rng(seed)
    for arrays in pool.layers:
        for i, array in enumerate(arrays):
            noise = rng.integers(0, 256, array.nbytes, dtype=np.uint8).reshape(array.shape[0], -1)
            arrays[i] = mx.array(noise).view(array.dtype)
    mx.eval(pool.layers)
    return pool


def contents(pool: KVArrays) -> list[list[bytes]]:
    """By array, by block: its bytes in all heads, found without the code under test."""
    return [
        [
            np.array(array.view(mx.uint8)).reshape(array.shape[0] // (BLOCKS * BLOCK), BLOCKS, -1)[:, b].tobytes()
            for b in range(BLOCKS)
        ]
        for arrays in pool.layers
        for array in arrays
    ]


def read(pool: KVArrays, blocks: list[int]) -> list[bytes]:
    found = pool.read(blocks)
    mx.eval(found)
    return pool.bytes_of(found, len(blocks))


KINDS = st.sampled_from([(0, mx.float32), (0, mx.bfloat16), (8, mx.float32), (4, mx.bfloat16)])


@settings(max_examples=25)
@given(KINDS, st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5), st.data())
def test_blocks_go_out_and_come_back_anywhere(
    kind: tuple[int, mx.Dtype], blocks: list[int], data: st.DataObject
) -> None:
    source, target = make(*kind, seed=1), make(*kind, seed=2)
    saved = read(source, blocks)
    assert {len(b) for b in saved} == {source.block_bytes}
    places = data.draw(st.lists(st.integers(0, BLOCKS - 1), min_size=len(blocks), max_size=len(blocks), unique=True))
    want, source_bytes = contents(target), contents(source)
    for block, place in zip(blocks, places, strict=True):
        for i, per_block in enumerate(want):
            per_block[place] = source_bytes[i][block]
    mx.eval(target.write(list(zip(places, saved, strict=True))))
    assert contents(target) == want
    assert read(target, places) == saved


@settings(max_examples=25)
@given(KINDS, st.permutations(range(BLOCKS)), st.integers(1, 3))
def test_blocks_are_copied_whole(kind: tuple[int, mx.Dtype], order: list[int], count: int) -> None:
    pool = make(*kind)
    copies = list(zip(order[:count], order[count : 2 * count], strict=True))
    want = contents(pool)
    for source, target in copies:
        for per_block in want:
            per_block[target] = per_block[source]
    for step in pool.copy(copies):
        mx.eval(step)
    assert contents(pool) == want


@pytest.mark.parametrize("size", [0, 1, -1])
def test_bytes_of_another_cache_are_refused(size: int) -> None:
    pool = make(8, mx.float32)
    before = contents(pool)
    with pytest.raises(ValueError, match=f"has {pool.block_bytes} bytes"):
        pool.write([(1, b"\0" * pool.block_bytes), (2, b"\0" * (pool.block_bytes + size if size else 0))])
    assert contents(pool) == before


def test_cleared_is_zero() -> None:
    pool = make(8, mx.float32)
    pool.clear()
    assert not any(any(block) for per_block in contents(pool) for block in per_block)
