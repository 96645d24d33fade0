"""What replaces MLX's own operations on the CPU back end is the same function."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_tandem.model.backend import cpu_functions as cpu

import mlx.core as mx  # isort: skip


def test_exp_is_exp() -> None:
    x = np.linspace(-86.9, 87.9, 200_001, dtype=np.float32)
    got = np.array(mx.compile(cpu.exp)(mx.array(x)), np.float64)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 1e-6


def test_exp_is_clipped_and_never_infinite() -> None:
    got = np.array(cpu.exp(mx.array([-math.inf, -1e30, -88.0, 0.0, 89.0, 1e30, math.inf])))
    assert np.isfinite(got).all()
    assert got[0] < 1e-37
    assert got[3] == 1.0
    assert got[-1] > 1e38


@pytest.mark.parametrize("axes", [1, 2])
def test_attention_is_mlx_s(axes: int) -> None:
    rng = np.random.default_rng(0)
    for rows, heads, kv_heads, length, positions in ((1, 4, 4, 1, 7), (3, 4, 2, 5, 33), (2, 8, 1, 16, 40)):
        q, k, v = (
            mx.array(rng.normal(0, 1, shape).astype(np.float32))
            for shape in ((rows, heads, length, 16), (rows, kv_heads, positions, 16), (rows, kv_heads, positions, 12))
        )
        seen = rng.random((rows, 1, length, positions)) < 0.5
        seen[..., 0] = True
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mx.array(seen))
        mask = mx.array(seen if axes == 1 else seen[:, :, None])
        assert np.allclose(np.array(cpu.attend(q, k, v, 0.3, mask)), np.array(expected), atol=1e-6)


def test_attention_over_two_parts_is_that_over_both() -> None:
    rng = np.random.default_rng(0)
    for rows, heads, kv_heads, positions, own in ((1, 4, 4, 7, 1), (3, 4, 2, 33, 3), (2, 8, 1, 40, 6)):
        q, *parts = (
            mx.array(rng.normal(0, 2, shape).astype(np.float32))
            for shape in (
                (rows, heads, 1, 16),
                *((rows, kv_heads, n, dim) for n in (positions, own) for dim in (16, 12)),
            )
        )
        seen = rng.random((rows, 1, 1, positions)) < 0.5
        seen[0] = False  # what came last is seen in any case
        whole = np.concatenate([seen, np.ones((rows, 1, 1, own), np.bool_)], -1)
        k, v = (mx.concatenate([before, last], axis=2) for before, last in zip(parts[:2], parts[2:], strict=True))
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mx.array(whole))
        got = cpu.attend_behind(q, parts[:2], parts[2:], 0.3, mx.array(seen))
        assert np.allclose(np.array(got), np.array(expected), atol=1e-6)


def test_what_a_query_does_not_see_has_no_weight() -> None:
    q = mx.ones((1, 1, 1, 8))
    k = mx.array(np.full((1, 1, 4, 8), 50.0, np.float32))
    v = mx.array(np.array([1.0, 1e30, 1e30, 1e30], np.float32).reshape(1, 1, 4, 1))
    mask = mx.array(np.array([True, False, False, False]).reshape(1, 1, 1, 4))
    assert cpu.attend(q, k, v, 1.0, mask).item() == 1.0


@pytest.mark.parametrize("size", [2000, cpu.LARGE])
def test_the_activation_and_its_gradient_are_those_of_mlx_lm(size: int) -> None:
    """In a step and outside of it, where training differentiates it, for small and large sizes."""
    from mlx_lm.models import qwen3

    cpu.install()
    rng = np.random.default_rng(size)
    gate, x, above = (mx.array(rng.normal(0, scale, size).astype(np.float32)) for scale in (20, 1, 1))
    expected, slopes = mx.vjp(lambda gate, x: gate * mx.sigmoid(gate) * x, [gate, x], [above])
    got, own = mx.vjp(qwen3.swiglu, [gate, x], [above])
    with cpu.serving():
        served = qwen3.swiglu(gate, x)
    for plain, ours in zip((expected[0], expected[0], *slopes), (got[0], served, *own), strict=True):
        assert np.allclose(np.array(ours), np.array(plain), rtol=1e-5, atol=2e-5)


def test_what_learning_traces_is_bounded() -> None:
    """Micro-batches have ever new sizes."""
    for n in range(2 * cpu.KEPT_SIZES):
        x = mx.full((cpu.LARGE + n,), 1.5)
        assert abs(cpu.fused_exp(x)[-1].item() / math.exp(1.5) - 1) < 1e-6
    assert cpu._traced.cache_info().currsize <= cpu.KEPT_SIZES
