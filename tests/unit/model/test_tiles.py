"""Tiles of rows: how rows are cut, and which sizes of tiles are found to give equal bits."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from mlx_tandem.errors import ModelError
from mlx_tandem.model import backend
from mlx_tandem.model.ops.attention.ordered import OrderedAttention
from mlx_tandem.model.ops.products.ordered import cut, in_tiles, matmul, sizes_of


@pytest.mark.parametrize(
    ("rows", "sizes", "tiles"),
    [
        (1, (4, 8), [4]),
        (5, (4, 8), [4, 4]),
        (6, (4, 8), [8]),
        (8, (4, 8), [8]),
        (19, (1, 2, 4, 8), [8, 8, 4]),
        (17, (16,), [16, 16]),
        (700, (64, 512), [512, 64, 64, 64]),
    ],
)
def test_tiles_hold_all_rows(rows: int, sizes: tuple[int, ...], tiles: list[int]) -> None:
    assert cut(rows, sizes) == tiles


@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_products_in_tiles_are_products(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = (mx.array(rng.standard_normal(shape).astype(np.float32)) for shape in ((2, rows, 16), (2, 16, 5)))
    right = np.array(x) @ np.array(w)
    assert np.allclose(np.array(matmul(x, w, (2, 8))), right, atol=1e-5)
    assert np.allclose(np.array(in_tiles(lambda x: x @ w[0], x[0], (2, 8))), right[0], atol=1e-5)


def product(x: mx.array) -> mx.array:
    """Return what no order of sums changes."""
    return mx.round(x)


def test_sizes_whose_bits_depend_on_the_place_are_left_out() -> None:
    def tiled(x: mx.array, sizes: Sequence[int]) -> mx.array:
        (size,) = sizes
        shift = mx.arange(size)[:, None] * 1e-6 if size > 4 else 0.0  # a row's place counts in tiles of more than 4
        return in_tiles(lambda x: product(x) + shift, x, sizes)

    assert sizes_of(tiled, 8, mx.float32, "these") == tuple(s for s in backend.current().products.tile_sizes if s <= 4)


def test_of_sizes_that_differ_those_with_the_largest_are_used() -> None:
    def tiled(x: mx.array, sizes: Sequence[int]) -> mx.array:
        return in_tiles(product, x, sizes) + (1e-6 if sizes[0] < 8 else 0.0)

    assert sizes_of(tiled, 8, mx.float32, "these") == tuple(s for s in backend.current().products.tile_sizes if s >= 8)


def test_a_device_that_minds_every_place_is_refused() -> None:
    def tiled(x: mx.array, sizes: Sequence[int]) -> mx.array:
        return product(x) + mx.arange(len(x))[:, None] * 1e-6

    with pytest.raises(ModelError, match="these give a row other bits in another place"):
        sizes_of(tiled, 8, mx.float32, "these")


class Shifted(OrderedAttention):
    """Attention whose queries see a position too many."""

    def whole(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, window: int | None) -> mx.array:
        return super().whole(queries, mx.roll(keys, 1, axis=2), mx.roll(values, 1, axis=2), scale, window)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_attention_that_is_wrong_is_found_at_start(dtype: mx.Dtype) -> None:
    right = OrderedAttention.of(32, dtype, 16, None)
    assert not right.problem(4, 2, 32, dtype)
    assert "wrong by" in Shifted(right.keys, right.block_size, right.sizes).problem(4, 2, 32, dtype)
