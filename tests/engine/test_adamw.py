"""The optimiser's arrays laid end to end: they come apart as they were, and its step is that of MLX's own."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.optimizers import AdamW
from msgspec import structs

from mlx_tandem.engine.learning import AdamParams
from mlx_tandem.training.device.adamw import ALIGNED, Moments, ends, flat, parts, update

SHAPES = st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6)


def some(shapes: list[tuple[int, ...]], seed: int) -> list[mx.array]:
    g = np.random.default_rng(seed)
    return [mx.array(g.standard_normal(shape).astype(np.float32)) for shape in shapes]


@given(SHAPES)
@settings(max_examples=30)
def test_arrays_come_apart_as_they_were(shapes: list[tuple[int, ...]]) -> None:
    arrays = some(shapes, 0)
    whole = flat(arrays)
    mx.eval(whole)
    start = np.asarray(whole).ctypes.data
    for x, y in zip(arrays, parts(whole, arrays), strict=True):
        assert x.shape == y.shape
        assert mx.array_equal(x, y)
        assert (np.asarray(y).ctypes.data - start) % (4 * ALIGNED) == 0
    assert ends(x.size for x in arrays)[-1] == whole.size


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_is_that_of_mlx(decay: float) -> None:
    adam = AdamParams(1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=decay)
    other = AdamW(1e-2, betas=[0.8, 0.9], eps=1e-6, weight_decay=decay, bias_correction=True)
    (p,) = some([(50,)], 1)
    wanted, moments = {"p": p}, Moments(mx.zeros((50,)), mx.zeros((50,)))
    for step in range(1, 6):
        (g,) = some([(50,)], 10 + step)
        p, moments = update(p, g, moments, step, adam)
        wanted = other.apply_gradients({"p": g}, wanted)
        assert np.allclose(np.array(p), np.array(wanted["p"]), rtol=1e-5, atol=1e-6)


def test_a_weight_s_ratio_is_one_of_its_learning_rate() -> None:
    """Of its decay, too: what a ratio alone differs in, a learning rate does just so."""
    adam = AdamParams(1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.25)
    ratio = 4.0
    faster = structs.replace(adam, learning_rate=ratio * adam.learning_rate)
    p, g = some([(8,), (8,)], 1)
    moments = Moments(g * 0.5, g.square())
    got, kept = update(p, g, moments, 3, adam, mx.array([1.0] * 4 + [ratio] * 4))
    for part, same in ((slice(0, 4), adam), (slice(4, 8), faster)):
        wanted, after = update(p, g, moments, 3, same)
        assert np.allclose(np.array(got[part]), np.array(wanted[part]), rtol=1e-6)
        assert mx.array_equal(kept.m, after.m) and mx.array_equal(kept.v, after.v)
