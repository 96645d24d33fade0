"""Logprobs of given tokens, with a gradient that is made in one array.

Their logits are the largest arrays of a pass. MLX's gradient of the same formula has six of that size, and on CUDA,
where what a graph needs is free when all of it is done, they are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def logprobs(logits: mx.array, target: mx.array, temperature: mx.array | None) -> mx.array:
    """[n] from logits [1, n, vocabulary] in float32, at this temperature [n] or 1."""
    scores = logits.squeeze(0)  # which an index would copy
    if temperature is not None:
        scores = scores / temperature[:, None]
    picked: mx.array = _picked(scores, target)[0]
    return picked


def _formula(scores: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """The second is for the gradient: what is left of it in the first is too coarse at low temperatures."""
    normaliser = mx.logsumexp(scores, axis=-1)
    return mx.take_along_axis(scores, target[:, None], axis=-1)[:, 0] - normaliser, normaliser


def _vjp(
    primals: Sequence[mx.array], cotangents: Sequence[mx.array], outputs: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    (scores, target), (cotangent, _), (_, normaliser) = primals, cotangents, outputs
    gradient = mx.exp(scores - normaliser[:, None]) * -cotangent[:, None]
    return gradient.at[mx.arange(target.size), target].add(cotangent), mx.zeros_like(target)


_picked: Any = mx.custom_function(_formula)
_picked.vjp(_vjp)
