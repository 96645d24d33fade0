"""Rows of the pool: what goes in comes out, to the last bit or to half a step of its grid, and NaN stays NaN."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_tandem.model.cache.kvformat import RowFormat

WIDTHS = st.sampled_from([4, 12, 13, 64, 80, 96, 112, 128, 192, 256, 576]) | st.integers(1, 600)
GROUPS = st.sampled_from([32, 64, 128]) | st.integers(8, 1024)
BITS = st.sampled_from([4, 8])


def grids(form: RowFormat, lines: Sequence[mx.array]) -> tuple[np.ndarray, np.ndarray]:
    """(distance, lowest), each [n, groups]: as any reader of the pool finds them."""
    words = np.array(lines[1])
    return (words & 0xFFFF0000).view(np.float32), (words << 16).view(np.float32)


def codes(form: RowFormat, lines: Sequence[mx.array]) -> np.ndarray:
    """[n, dim], as any reader of the pool finds them: the first in the lowest bits."""
    per_word = 32 // form.bits
    at = np.arange(form.dim)
    return np.array(lines[0])[:, at // per_word] >> (at % per_word * form.bits).astype(np.uint32) & (1 << form.bits) - 1


@settings(max_examples=60)
@given(WIDTHS, BITS, GROUPS, st.integers(0, 2**32 - 1), st.floats(-30, 30), st.floats(-4, 3))
@example(64, 8, 64, 0, -20.0, -2.0)
@example(80, 4, 64, 1, 4.0, 2.0)
def test_every_number_is_within_half_a_step(
    dim: int, bits: int, group: int, seed: int, size: float, offset: float
) -> None:
    """At any magnitude, and beside an offset that is much larger than what varies."""
    form = RowFormat(2, dim, mx.float32, bits, group)
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((5, dim)) * 10.0**size
    x = (x + rng.standard_normal((5, 1)) * 10.0 ** (size + offset)).astype(np.float32)
    x[0] = 0.0
    lines = form.encode(mx.array(x))
    assert [(a.shape[1], a.dtype) for a in lines] == list(form.lines())
    y = np.array(form.decode(lines))
    distance, lowest = (np.repeat(a, dim // form.groups, 1) for a in grids(form, lines))
    rounding = np.abs(x).max(1, keepdims=True) * 4e-7
    assert (np.abs(y - x) <= distance * 0.501 + rounding).all()
    parts = x.astype(np.float64).reshape(5, form.groups, -1)
    spread, far = np.ptp(parts, axis=-1), np.abs(parts).max(-1)
    fair = (spread + far * 2.0**-7) / ((1 << bits) - 1) * (1 + 2.0**-6) + 1e-30
    assert (grids(form, lines)[0] <= fair).all(), "the grid is no wider than it must be"
    assert (np.abs(y - (codes(form, lines) * distance + lowest)) <= rounding).all()


@given(WIDTHS, BITS, GROUPS)
def test_groups_are_equal_and_as_large_as_was_asked(dim: int, bits: int, group: int) -> None:
    form = RowFormat(3, dim, mx.bfloat16, bits, group)
    size, rest = divmod(dim, form.groups)
    assert rest == 0
    assert size >= min(group, dim)
    assert form.bytes_per_token() == 3 * (4 * -(-dim * bits // 32) + 4 * form.groups)


@pytest.mark.parametrize("dim", [64, 80, 96, 112, 128, 192, 256, 576])
def test_heads_of_served_models_take_little_more_than_half(dim: int) -> None:
    """Of bfloat16, with the group that is taken unless told."""
    full, half = (RowFormat(8, dim, mx.bfloat16, bits, 64).bytes_per_token() for bits in (0, 8))
    assert half <= 0.54 * full
    assert full >= 1.85 * half


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_spoils_its_own_group_only(dtype: mx.Dtype, bits: int, bad: float) -> None:
    form = RowFormat(1, 128, dtype, bits, 64)
    for at in (0, 17, 63, 64, 127):
        x = np.random.default_rng(at).standard_normal((3, 128)).astype(np.float32)
        x[1, at] = bad
        y = form.decode(form.encode(mx.array(x).astype(dtype)))
        assert y.dtype == dtype
        finite = np.isfinite(np.array(y.astype(mx.float32)))
        assert not finite[1, at]
        finite[1, at // 64 * 64 : at // 64 * 64 + 64] = True
        assert finite.all()


def test_a_row_in_full_is_kept_to_the_bit() -> None:
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        form = RowFormat(2, 48, dtype)
        x = mx.random.normal((7, 48)).astype(dtype)
        assert mx.array_equal(form.decode(form.encode(x)), x)
        assert form.bytes_per_token() == 2 * 48 * dtype.size


def test_a_head_without_width_has_nothing_to_quantise() -> None:
    form = RowFormat(1, 0, mx.float32, 8, 64)
    assert form.decode(form.encode(mx.zeros((3, 0)))).shape == (3, 0)


def test_a_row_s_code_does_not_depend_on_the_rows_beside_it() -> None:
    form = RowFormat(1, 80, mx.float32, 8, 64)
    x = mx.random.normal((33, 80))
    together = form.encode(x)
    for i in range(33):
        for a, b in zip(form.encode(x[i : i + 1]), together, strict=True):
            assert mx.array_equal(a[0], b[i])
