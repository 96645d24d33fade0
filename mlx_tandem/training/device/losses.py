"""Losses of token logprobs: one formula for each kind, with the switches of `engine.learning.LossConfig`.

Per token with p = log π_trainer, q = log π_sampler, r = exp(p - q) and weight A:

    cross_entropy         -A p
    importance_sampling   -r A
    ppo                   -min(r A, clip(r) A)                         Schulman et al. 2017
    cispo                 -stop(clip(r)) A p                           MiniMax-M1 2025
    dro                   -(A p - beta/2 (p - q)²)                     Richemond et al. 2024
    score                 -A s

s is what the score head of a reward model makes of the hidden state of the token itself. It takes the place of p. Any
loss of scores is learned by it: A is the negative gradient of that loss by the score.

With ratio "sequence", r is exp(mean over the trained tokens of p - q) (GSPO, Zheng et al. 2025). Tokens that are not
trained, such as those of tools between two turns, count in no mean and have no gradient.

A ratio over `max_importance_ratio` makes the token count less by as much, so that what the sampler drew too seldom
cannot dominate. cispo's ratio is a weight already, which its clip bounds, and dro has no ratio: neither is truncated.

With `decoupled` (Hilton et al. 2022, Fu et al. 2025), o stands for the anchor, the logprobs of the trainer at the
beginning of the update. Then p - o takes the place of p - q in all of the above, and each token's loss is multiplied by
exp(o - q), at most `max_importance_ratio`, once for every kind: what is clipped is how far this update goes, and what
corrects for the sampler has no gradient.

`max_divergence` leaves out the tokens with negative weights of a completion where the mean of q - p over the trained
tokens is larger (off-policy sequence masking, DeepSeek-V3.2 2025): the policy would not say this any more.

`kl_coef` adds k3 to a reference model, exp(b - p) - 1 - (b - p) (Schulman 2020), for all trained tokens, those of an
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
    anchor: mx.array  # o, which only decoupled losses read


def loss(
    p: mx.array, batch: TokenBatch, config: LossConfig, reference: mx.array | None, whole: mx.array | None = None
) -> mx.array:
    """Return the loss, summed over tokens. `p` and (unless `kl_coef` is 0) `reference` are as its arrays.

    `p` is -inf for tokens that a truncated draw could not take now: they count as tokens that are not trained. `whole`
    are the logprobs without truncation, which `reference` is compared with; None: `p`.
    """
    inside = p > -mx.inf
    whole = p if whole is None else whole
    p, q, o = (mx.where(inside, x, 0.0) for x in (p, batch.logprobs, batch.anchor))
    mask = batch.mask * inside
    batch = batch._replace(logprobs=q, anchor=o, mask=mask)
    each = _policy(p, batch, config)
    if config.max_divergence and config.kind != "cross_entropy":
        away = _mean(mx.stop_gradient(batch.logprobs - p), batch.mask)
        each = mx.where((batch.weights >= 0.0) | (away <= config.max_divergence), each, 0.0)
    if reference is not None:
        d = reference - mx.where(inside, whole, 0.0)
        each = each + config.kl_coef * (mx.exp(mx.clip(d, -20.0, 20.0)) - 1.0 - d)
    return (each * batch.shares * batch.mask).sum()


def _policy(p: mx.array, batch: TokenBatch, config: LossConfig) -> mx.array:
    """Return the loss of each token without its share, the divergence and the reference."""
    a = batch.weights
    if config.kind in ("cross_entropy", "score"):
        return -a * p
    distance = p - (batch.anchor if config.decoupled else batch.logprobs)
    if config.ratio == "sequence":
        distance = mx.broadcast_to(_mean(distance, batch.mask), p.shape)
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
    most = config.max_importance_ratio
    if config.decoupled:
        w = mx.exp(mx.clip(batch.anchor - batch.logprobs, -20.0, 20.0))
        each = each * mx.stop_gradient(mx.minimum(w, most) if most else w)
    elif most and config.kind in ("importance_sampling", "ppo"):
        each = each * mx.stop_gradient(mx.minimum(1.0, most / r))
    return each


def _mean(x: mx.array, mask: mx.array) -> mx.array:
    """Return the mean of each row's trained tokens, [sequences, 1]; 0 where there are none."""
    return (x * mask).sum(-1, keepdims=True) / mx.maximum(mask.sum(-1, keepdims=True), 1.0)


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
