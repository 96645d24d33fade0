"""The losses and their gradients against formulas written out in NumPy, in float64, one token at a time."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.learning import LossConfig
from mlx_tandem.training.device.losses import TokenBatch, loss, shares

KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def one_token(config: LossConfig, p: float, q: float, a: float, ratio: float, base: float) -> float:
    """A token's loss; `ratio` is that of its sequence where the configuration says so."""
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    distance = math.log(ratio)
    value = {
        "cross_entropy": -a * p,
        "importance_sampling": -ratio * a,
        "ppo": -min(ratio * a, clipped * a),
        "cispo": -clipped * a * p,
        "dro": -(a * p - config.beta / 2 * distance**2),
    }[config.kind]
    if config.kind != "cross_entropy" and config.max_importance_ratio:
        value *= min(1.0, config.max_importance_ratio / ratio)
    if config.kl_coef and a:
        value += config.kl_coef * (math.exp(base - p) - 1 - (base - p))
    return value


def by_hand(config: LossConfig, p: Any, q: Any, a: Any, base: Any, lengths: list[int]) -> float:
    counts = shares([tuple(a[i][:n]) for i, n in enumerate(lengths)], config)
    total = 0.0
    for i, n in enumerate(lengths):
        ratios = [math.exp(p[i][t] - q[i][t]) for t in range(n)]
        if config.ratio == "sequence":
            ratios = [math.exp(sum(p[i][t] - q[i][t] for t in range(n)) / n)] * n
        total += counts[i] * sum(one_token(config, p[i][t], q[i][t], a[i][t], ratios[t], base[i][t]) for t in range(n))
    return total


def arrays(
    p: Any, q: Any, a: Any, base: Any, lengths: list[int], config: LossConfig
) -> tuple[mx.array, TokenBatch, Any]:
    counts = shares([tuple(a[i][:n]) for i, n in enumerate(lengths)], config)
    mask = np.zeros(np.shape(p), np.float32)
    for i, n in enumerate(lengths):
        mask[i, :n] = 1
    share = mask * np.array(counts, np.float32)[:, None]

    def f32(x: Any) -> mx.array:
        return mx.array((np.array(x) * mask).astype(np.float32))

    batch = TokenBatch(f32(q), f32(a), mx.array(share.astype(np.float32)), mx.array(mask))
    return f32(p), batch, f32(base) if config.kl_coef else None


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from(["token", "sequence"]),
    normalize=st.sampled_from(["token_sum", "token_mean", "sequence_mean"]),
    kl=st.sampled_from([0.0, 0.3]),
    most=st.sampled_from([0.0, 1.3]),
    scale=st.sampled_from([1.0, 0.25]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_loss_is_its_formula(kind, ratio, normalize, kl, most, scale, lengths, seed):
    config = LossConfig(kind, ratio, normalize, scale, kl_coef=kl, max_importance_ratio=most)
    g = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths))
    p, q, base = (-3 * g.random(shape) for _ in range(3))
    a = np.where(g.random(shape) < 0.2, 0.0, g.normal(size=shape))
    given_p, batch, given_base = arrays(p, q, a, base, lengths, config)
    found = loss(given_p, batch, config, given_base)
    wanted = by_hand(config, p, q, a, base, lengths)
    assert float(np.array(found)) == pytest.approx(wanted, rel=2e-4, abs=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from(["token", "sequence"]),
    kl=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_gradient_is_that_of_finite_differences(kind, ratio, kl, seed):
    """Away from the kinks of clipping, and without what is kept out of the gradient on purpose (cispo's ratio)."""
    config = LossConfig(kind, ratio, kl_coef=kl, clip_low=0.5, clip_high=50.0)
    g = np.random.default_rng(seed)
    lengths = [3, 5]
    shape = (2, 5)
    p, base = (-1 - g.random(shape) for _ in range(2))
    q = p - 0.3 * (g.random(shape) - 0.5)
    a = g.normal(size=shape)
    given_p, batch, given_base = arrays(p, q, a, base, lengths, config)
    gradient = np.array(mx.grad(lambda x: loss(x, batch, config, given_base))(given_p))
    frozen = [[min(max(math.exp(p[i][t] - q[i][t]), 0.5), 51.0) for t in range(n)] for i, n in enumerate(lengths)]
    if ratio == "sequence":
        frozen = [[math.exp(float(np.mean(p[i][:n] - q[i][:n])))] * n for i, n in enumerate(lengths)]

    def value(x: Any) -> float:
        if kind != "cispo":
            return by_hand(config, x, q, a, base, lengths)
        return sum(
            -frozen[i][t] * a[i][t] * x[i][t] + kl * (math.exp(base[i][t] - x[i][t]) - 1 - (base[i][t] - x[i][t]))
            for i, n in enumerate(lengths)
            for t in range(n)
        )

    for i, n in enumerate(lengths):
        for t in range(n):
            step = np.zeros(shape)
            step[i, t] = 1e-5
            wanted = (value(p + step) - value(p - step)) / 2e-5
            assert gradient[i, t] == pytest.approx(wanted, rel=2e-3, abs=2e-4)
        assert not gradient[i, n:].any(), "padding has a gradient"


def test_shares():
    weights = [(1.0, 0.0, 2.0), (0.0, 0.0), (-1.0,)]
    assert shares(weights, LossConfig(normalize="token_sum", scale=0.5)) == [0.5, 0.5, 0.5]
    assert shares(weights, LossConfig(normalize="token_mean")) == [1 / 3] * 3
    assert shares(weights, LossConfig(normalize="sequence_mean"))[::2] == [1 / 4, 1 / 2]
