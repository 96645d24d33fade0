"""Logprobs of given tokens, with a gradient that is made in one array of the size of the logits.

Logits are the largest arrays of a pass. MLX's own gradient of the same formula makes six arrays of that size, and on
CUDA all of them are in memory at once: what a graph needs is freed when all of the graph is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlx_tandem.model import backend
from mlx_tandem.model.ops.sampling.sampler import kept


def logprobs(
    logits: mx.array, target: mx.array, temperature: mx.array | None, truncation: mx.array | None = None
) -> mx.array:
    """Return the logprobs [n] of `target` [n] under logits [1, n, vocabulary], float32. `temperature` [n]; None: 1.

    `truncation` [n, 3] has top_p, top_k and min_p of each draw; None: none is truncated. Then the logprobs are those of
    the tokens that such a draw may take, and -inf for others. Which these are has no gradient.
    """
    scores = logits.squeeze(0)  # an index would copy it
    if temperature is not None:
        scores = scores / temperature[:, None]
    if truncation is not None:
        fixed = mx.stop_gradient(scores)
        p = mx.exp(fixed - fixed.max(-1, keepdims=True))
        scores = mx.where(kept(p, truncation[:, :1], truncation[:, 1:2], truncation[:, 2:]), scores, -mx.inf)
    picked: mx.array = _picked(scores, target)[0]
    return picked


def sampler_logprobs(
    logits: mx.array, target: mx.array, temperature: mx.array | None, truncation: mx.array | None = None
) -> mx.array:
    """Return the same as `logprobs`, with the bits that the sampler computes for the token that it has drawn."""
    plain = logprobs(logits, target, temperature, truncation)
    scores = mx.stop_gradient(logits.squeeze(0))
    scaled = scores - scores.max(-1, keepdims=True)
    if temperature is not None:
        scaled = scaled / temperature[:, None]
    p = backend.current().exp(scaled)
    chosen = target[:, None]
    left = p
    if truncation is not None:
        left = mx.where(kept(p, truncation[:, :1], truncation[:, 1:2], truncation[:, 2:]), p, 0.0)
    exact = mx.log(mx.take_along_axis(left, chosen, -1) / left.sum(-1, keepdims=True))[:, 0]
    found: mx.array = _with_value(plain, exact)
    return found


def model_logprobs(logits: mx.array, target: mx.array) -> mx.array:
    """Return the logprobs at temperature 1, with the bits that a step computes for the model's own distribution."""
    scores = mx.stop_gradient(logits.squeeze(0))
    exact = mx.take_along_axis(scores, target[:, None], -1) - mx.logsumexp(scores, -1, keepdims=True)
    found: mx.array = _with_value(logprobs(logits, target, None), exact[:, 0])
    return found


_with_value: Any = mx.custom_function(lambda plain, exact: exact + 0)
_with_value.vjp(lambda primals, cotangent, _: (cotangent, mx.zeros_like(primals[1])))


def _formula(scores: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """Return logprobs and the normaliser, which the gradient needs: at low temperatures a logprob is too coarse to
    compute it from.
    """
    normaliser = backend.current().log_sum_exp(scores)
    return mx.take_along_axis(scores, target[:, None], axis=-1)[:, 0] - normaliser, normaliser


def _vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    (scores, target), (cotangent, _), (_, normaliser) = primals, cotangents, outputs
    gradient = backend.current().exp_alone(scores - normaliser[:, None]) * -cotangent[:, None]
    return gradient.at[mx.arange(target.size), target].add(cotangent), mx.zeros_like(target)


_picked: Any = mx.custom_function(_formula)
_picked.vjp(_vjp)
