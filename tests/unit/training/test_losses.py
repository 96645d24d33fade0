"""The losses and their gradients against formulas written out in NumPy, in float64, one token at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.learning import LossConfig
from mlx_tandem.training.device.losses import TokenBatch, loss, shares

KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")


def one_token(config: LossConfig, p: float, a: float, ratio: float, weight: float) -> float:
    """A token's loss; `ratio` is that of its sequence where the configuration says so, `weight` that of the anchor."""
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    distance = math.log(ratio)
    value = {
        "cross_entropy": -a * p,
        "importance_sampling": -ratio * a,
        "ppo": -min(ratio * a, clipped * a),
        "cispo": -clipped * a * p,
        "dro": -(a * p - config.beta / 2 * distance**2),
    }[config.kind]
    most = config.max_importance_ratio
    if config.decoupled and config.kind != "cross_entropy":
        value *= min(weight, most) if most else weight
    elif config.kind in ("importance_sampling", "ppo") and most:
        value *= min(1.0, most / ratio)
    return value


def k3(base: float, p: float) -> float:
    return math.exp(base - p) - 1 - (base - p)


def by_hand(config: LossConfig, p: Any, q: Any, a: Any, base: Any, trained: Any, o: Any = None) -> tuple[float, float]:
    """The loss, and the sum of the absolute values of its terms."""
    counts = shares([tuple(row) for row in trained], config)
    terms = []
    for i, row in enumerate(trained):
        kept = [t for t, on in enumerate(row) if on]
        near = o if config.decoupled else q
        ratios = {t: math.exp(p[i][t] - near[i][t]) for t in kept}
        if config.ratio == "sequence" and kept:
            ratios = dict.fromkeys(kept, math.exp(sum(p[i][t] - near[i][t] for t in kept) / len(kept)))
        away = sum(q[i][t] - p[i][t] for t in kept) / max(len(kept), 1)
        for t in kept:
            weight = math.exp(o[i][t] - q[i][t]) if config.decoupled else 1.0
            value = one_token(config, p[i][t], a[i][t], ratios[t], weight)
            far = config.max_divergence and away > config.max_divergence and config.kind != "cross_entropy"
            value = 0.0 if far and a[i][t] < 0 else value
            terms.append(counts[i] * (value + config.kl_coef * k3(base[i][t], p[i][t])))
    return math.fsum(terms), math.fsum(map(abs, terms))


def arrays(
    p: Any, q: Any, a: Any, base: Any, trained: Any, config: LossConfig, o: Any = None
) -> tuple[mx.array, TokenBatch, Any]:
    counts = shares([tuple(row) for row in trained], config)

    def f32(x: Any) -> mx.array:
        return mx.array(np.array(x).astype(np.float32))

    share = np.broadcast_to(np.array(counts)[:, None], np.shape(p))
    batch = TokenBatch(f32(q), f32(a), f32(share), f32(trained), f32(q if o is None else o))
    return f32(p), batch, f32(base) if config.kl_coef else None


@settings(max_examples=300)
@given(
    kind=st.sampled_from(KINDS),
    ratio=st.sampled_from(["token", "sequence"]),
    normalize=st.sampled_from(["token_sum", "token_mean", "sequence_mean"]),
    kl=st.sampled_from([0.0, 0.3]),
    most=st.sampled_from([0.0, 1.3]),
    clip=st.sampled_from([(0.2, 0.2), (0.2, 0.28), (3e-4, 4e-4), (1.0, 3.0)]),
    decoupled=st.booleans(),
    away=st.sampled_from([0.0, 0.5]),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6)),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_loss_is_its_formula(kind, ratio, normalize, kl, most, clip, decoupled, away, shape, seed):
    """With tokens that are not trained between those that are, and average completions, whose weights are all 0."""
    config = LossConfig(
        kind, ratio, normalize, 0.25, *clip, kl_coef=kl, max_importance_ratio=most,
        decoupled=decoupled, max_divergence=away,
    )  # fmt: skip
    g = np.random.default_rng(seed)
    p, q, base, o = (np.float64(np.float32(-3 * g.random(shape))) for _ in range(4))
    a = np.float64(np.float32(np.where(g.random((shape[0], 1)) < 0.2, 0.0, g.normal(size=shape))))
    trained = g.random(shape) < 0.7
    given_p, batch, given_base = arrays(p, q, a, base, trained, config, o)
    found = float(np.array(loss(given_p, batch, config, given_base)))
    wanted, size = by_hand(config, p, q, a, base, trained, o)
    assert abs(found - wanted) <= 1e-6 * max(size, 0.1)


TRL = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
"""Losses and gradients that TRL's own code has computed; scripts/trl_losses.py wrote them."""


def ours(case: dict[str, Any]) -> LossConfig:
    """The configuration that stands for a case of TRL's."""
    most = {"max_importance_ratio": TRL["most"]} if case.get("sampler") else {}
    low = case.get("epsilon", 0.2)
    high = case.get("epsilon_high", low)
    normalize, scale = {
        "grpo": ("sequence_mean", 1.0),
        "dr_grpo": ("token_sum", 1.0 / (4 * TRL["longest"])),
        "dapo": ("token_mean", 1.0),
        "cispo": ("token_mean", 1.0),
    }[case["loss_type"]]
    cispo = case["loss_type"] == "cispo"
    return LossConfig(
        "cispo" if cispo else "ppo",
        case.get("level", "token"),
        normalize,
        scale,
        1.0 if cispo else low,
        high - 1.0 if cispo else high,
        kl_coef=case.get("beta", 0.0),
        decoupled=True,  # TRL's ratios are those to the policy before the update
        max_divergence=case.get("off_policy_mask_threshold", 0.0),
        **most,
    )


@pytest.mark.parametrize("name", sorted(TRL["losses"]))
def test_losses_and_gradients_are_those_of_trl(name):
    data, found = TRL["data"], TRL["losses"][name]
    trained = np.array(data["mask"], bool)
    config = ours(found["case"])
    weights = np.broadcast_to(np.array(data["advantages"])[:, None], trained.shape)
    sampled = data["sampled"] if found["case"].get("sampler") else data["old"]
    p, batch, base = arrays(data["new"], sampled, weights, data["reference"], trained, config, data["old"])
    assert float(np.array(loss(p, batch, config, base))) == pytest.approx(found["loss"], abs=1e-6)
    gradient = np.array(mx.grad(lambda x: loss(x, batch, config, base))(p))
    assert gradient == pytest.approx(np.array(found["gradient"]), abs=1e-6)


def test_the_anchor_of_a_decoupled_loss_bounds_the_update_and_not_what_the_sampler_did():
    """The sampler was far away and the policy has hardly moved since: nothing is clipped, the weight is bounded."""
    p, q, o, a = [[-1.0]], [[-3.0]], [[-1.1]], [[1.0]]
    for decoupled, wanted in ((True, -2.0 * math.exp(0.1)), (False, 0.0)):
        config = LossConfig("ppo", max_importance_ratio=2.0, decoupled=decoupled)
        given_p, batch, _ = arrays(p, q, a, p, [[True]], config, o)
        gradient = mx.grad(lambda x, b=batch, c=config: loss(x, b, c, None))(given_p)
        assert float(np.array(gradient)[0, 0]) == pytest.approx(wanted, abs=1e-6)


def test_the_divergence_of_a_truncated_draw_is_that_of_all_tokens():
    """The reference is compared with the logprobs without truncation; what could not be drawn counts for nothing."""
    config = LossConfig("ppo", "token", "token_sum", kl_coef=0.3)
    drawn, plain, base = [[-0.5, -math.inf]], [[-1.0, -2.0]], [[-1.3, -0.7]]
    p, batch, reference = arrays(drawn, plain, [[0.0, 0.0]], base, [[True, True]], config)
    found, gradients = mx.value_and_grad(lambda x: loss(x[0], batch, config, reference, x[1]))([p, mx.array(plain)])
    assert float(np.array(found)) == pytest.approx(0.3 * k3(-1.3, -1.0), abs=1e-6)
    by_drawn, by_plain = (np.array(each)[0] for each in gradients)
    assert not by_drawn.any()
    assert by_plain == pytest.approx([0.3 * (1.0 - math.exp(-0.3)), 0.0], abs=1e-6)


def test_gspo_leaves_out_what_is_not_trained():
    """A tool's answer between two turns, which the policy finds very unlikely, changes nothing."""
    config = LossConfig("ppo", "sequence", "sequence_mean", clip_low=3e-4, clip_high=4e-4)
    p, q, a = [[-1.0, -9.0, -1.0]], [[-1.0, -0.1, -1.0]], [[1.0, 1.0, 1.0]]
    given_p, batch, _ = arrays(p, q, a, p, [[True, False, True]], config)
    assert float(np.array(loss(given_p, batch, config, None))) == pytest.approx(-1.0, abs=1e-6)
    gradient = np.array(mx.grad(lambda x: loss(x, batch, config, None))(given_p))[0]
    assert gradient == pytest.approx([-0.5, 0.0, -0.5], abs=1e-6)


@settings(max_examples=60)
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
    trained = np.arange(5) < np.array(lengths)[:, None]
    given_p, batch, given_base = arrays(p, q, a, base, trained, config)
    gradient = np.array(mx.grad(lambda x: loss(x, batch, config, given_base))(given_p))
    frozen = [[min(max(math.exp(p[i][t] - q[i][t]), 0.5), 51.0) for t in range(n)] for i, n in enumerate(lengths)]
    if ratio == "sequence":
        frozen = [[math.exp(float(np.mean(p[i][:n] - q[i][:n])))] * n for i, n in enumerate(lengths)]

    def value(x: Any) -> float:
        if kind != "cispo":
            return by_hand(config, x, q, a, base, trained)[0]
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
    trained = [(True, False, True), (False, False), (True,)]
    assert shares(trained, LossConfig(normalize="token_sum", scale=0.5)) == [0.5, 0.5, 0.5]
    assert shares(trained, LossConfig(normalize="token_mean")) == [1 / 3] * 3
    assert shares(trained, LossConfig(normalize="sequence_mean"))[::2] == [1 / 4, 1 / 2]
