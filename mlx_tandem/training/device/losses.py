"""Losses of token logprobs: one formula for each kind, with the switches of `engine.learning.LossConfig`.

Per token with p = log π_trainer, q = log π_sampler, r = exp(p - q) and weight A:

    cross_entropy         -A p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)                         Schulman et al. 2017
    cispo                 -stop(clip(r)) A p                           MiniMax-M1 2025
    dro                   -(A p - beta/2 (p - q)²)                     Richemond et al. 2024

With ratio "sequence", r is exp(mean over the trained tokens of p - q) (GSPO, Zheng et al. 2025). Tokens that are not
trained, such as those of tools between two turns, count in no mean and have no gradient.

A ratio over `max_importance_ratio` makes the token count less by as much, so that what the sampler drew too seldom
cannot dominate. cispo's ratio is a weight already, which its clip bounds, and dro has no ratio: neither is truncated.
`kl_coef` adds k3 to the base model, exp(b - p) - 1 - (b - p) (Schulman 2020), for all trained tokens, those of an
average completion among them.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.engine.learning import LossConfig


class TokenBatch(NamedTuple):
    """Numbers for each completion token, [sequences, longest], float32. Padding has weight and share 0."""

    logprobs: mx.array  # q
    weights: mx.array  # A
    shares: mx.array  # factor of each token's loss (the normalisation)
    mask: mx.array  # 1 for trained tokens


def loss(p: mx.array, batch: TokenBatch, config: LossConfig, base: mx.array | None) -> mx.array:
    """Return the loss, summed over tokens. `p` and (unless `kl_coef` is 0) `base` are as its arrays."""
    a = batch.weights
    if config.kind == "cross_entropy":
        each = -a * p
    else:
        distance = p - batch.logprobs
        if config.ratio == "sequence":
            count = mx.maximum(batch.mask.sum(-1, keepdims=True), 1.0)
            distance = mx.broadcast_to((distance * batch.mask).sum(-1, keepdims=True) / count, p.shape)
        r = mx.exp(mx.clip(distance, -20.0, 20.0))
        clipped = mx.clip(r, 1.0 - config.clip_low, 1.0 + config.clip_high)
        if config.kind == "importance_sampling":
            each = -r * a
        elif config.kind == "ppo":
            each = -mx.minimum(r * a, clipped * a)
        elif config.kind == "cispo":
            each = -mx.stop_gradient(clipped) * a * p
        else:
            each = -(a * p - 0.5 * config.beta * distance * distance)
        if config.max_importance_ratio and config.kind in ("importance_sampling", "ppo"):
            each = each * mx.stop_gradient(mx.minimum(1.0, config.max_importance_ratio / r))
    if base is not None:
        d = base - p
        each = each + config.kl_coef * (mx.exp(mx.clip(d, -20.0, 20.0)) - 1.0 - d)
    return (each * batch.shares * batch.mask).sum()


def shares(trained: list[tuple[bool, ...]], config: LossConfig) -> list[float]:
    """Return the factor of a token's loss for each completion. Only tokens that are trained are counted."""
    tokens = [sum(own) for own in trained]
    if config.normalize == "token_sum":
        each = [1.0] * len(tokens)
    elif config.normalize == "token_mean":
        each = [1.0 / max(sum(tokens), 1)] * len(tokens)
    else:
        with_tokens = max(sum(n > 0 for n in tokens), 1)
        each = [1.0 / (max(n, 1) * with_tokens) for n in tokens]
    return [config.scale * s for s in each]
