"""What replaces MLX's own operations on the CPU back end is the same function."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mlx_tandem.model import cpu

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


def test_what_a_query_does_not_see_has_no_weight() -> None:
    q = mx.ones((1, 1, 1, 8))
    k = mx.array(np.full((1, 1, 4, 8), 50.0, np.float32))
    v = mx.array(np.array([1.0, 1e30, 1e30, 1e30], np.float32).reshape(1, 1, 4, 1))
    mask = mx.array(np.array([True, False, False, False]).reshape(1, 1, 1, 4))
    assert cpu.attend(q, k, v, 1.0, mask).item() == 1.0


def test_models_compute_as_written_outside_of_a_step() -> None:
    """Training differentiates the models, and the replacement cannot be differentiated."""
    from mlx_lm.models import qwen3

    cpu.install()
    gate = mx.array(np.linspace(-30, 30, 2000, dtype=np.float32))
    plain = qwen3.swiglu(gate, gate)
    with cpu.serving():
        fast = qwen3.swiglu(gate, gate)
    assert np.allclose(np.array(plain), np.array(fast), rtol=1e-5, atol=1e-6)
    slope = mx.grad(lambda x: qwen3.swiglu(x, x).sum())(gate)
    assert float(mx.abs(slope).sum()) > 0.0
