"""Chunks of prompts whose keys need no table: what the cache gives out is what a table would have given."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.pools import KVArrays
from mlx_tandem.model.ops.attention.cache import PagedCache, PoolLayout, StepView

BLOCK, HEADS, DIM, LENGTH = 4, 2, 16, 8


@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("start", "kept"), [(0, None), (5, None), (8, None), (0, 2), (8, 3)])
def test_a_level_chunk_sees_what_a_table_shows(bits: int, in_place: bool, start: int, kept: int | None) -> None:
    """Or a table that begins with the block of a window's first position."""
    form = RowFormat(HEADS, DIM, mx.float32, bits, 8)
    cache, pool = PagedCache(LayerShape(form, form)), KVArrays([LayerShape(form, form)], 9, BLOCK)
    table = np.array([[2, 3, 4, 5]], np.int32)
    rng = np.random.default_rng(start)
    keys, values = (mx.array(rng.standard_normal((1, HEADS, start + LENGTH, DIM)), mx.float32) for _ in range(2))

    def fetch(first: int, end: int, common_offset: int | None) -> tuple[mx.array, mx.array]:
        at = np.arange(first, end)[None]
        slots = mx.array((table[0][at // BLOCK] * BLOCK + at % BLOCK).astype(np.int32))
        passed = max(first + 1 - (kept or 99), 0) // BLOCK
        run = (2 + passed, 6) if in_place and common_offset is not None else None
        view = StepView(
            mx.array([first], mx.int32), slots, mx.array(table[:, passed:]),
            PoolLayout(9, BLOCK, mask_axes=1, kept=kept), run, common_offset,
        )  # fmt: skip
        cache.bind(pool.layers[0], view)
        seen = cache.update_and_fetch(keys[:, :, first:end], values[:, :, first:end])
        whole = view.mask(end - first, None)
        mx.eval(seen, whole)
        assert (
            cache.make_mask(end - first) == "causal"
            if common_offset is not None
            else whole.shape[-1] == seen[0].shape[2]
        )
        masks[common_offset] = cache.make_mask(end - first, return_array=True, window_size=kept)
        pool.layers = [cache.release()]
        return seen

    masks: dict[int | None, mx.array | str] = {}

    if start:
        fetch(0, start, None)
    at_once = fetch(start, start + LENGTH, start)
    plain = fetch(start, start + LENGTH, None)
    length = start + LENGTH - max(start + 1 - (kept or 99), 0) // BLOCK * BLOCK
    for ours, theirs in zip((*at_once, masks[start]), (*plain, masks[None]), strict=True):
        assert isinstance(ours, mx.array) and isinstance(theirs, mx.array)
        axis = 2 if ours.shape[1] == HEADS else 3
        assert ours.shape[axis] == length
        assert mx.array_equal(ours, mx.take(theirs, mx.arange(length), axis=axis))


def test_a_level_mask_is_made_where_one_is_asked_for() -> None:
    """Of families that do their own softmax, and of a window that is shorter than the context."""
    cache = PagedCache(LayerShape(*[RowFormat(1, 4, mx.float32)] * 2))
    cache.bind([], StepView(mx.array([3], mx.int32), mx.zeros((1, 5), mx.int32), mx.zeros((1, 2), mx.int32),
                            PoolLayout(3, 4, mask_axes=1), common_offset=3))  # fmt: skip
    key, query = np.arange(8)[None], 3 + np.arange(5)[:, None]
    asked, windowed = cache.make_mask(5, return_array=True), cache.make_mask(5, window_size=4)
    assert isinstance(asked, mx.array)
    assert isinstance(windowed, mx.array)
    assert np.array_equal(np.array(asked)[0, 0], key <= query)
    assert np.array_equal(np.array(windowed)[0, 0], (key <= query) & (key > query - 4))
    assert cache.make_mask(5, window_size=8) == "causal"
