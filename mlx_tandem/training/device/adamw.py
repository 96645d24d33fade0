"""AdamW on many small arrays as on one: they are laid end to end, so that a step is a few operations, not hundreds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.engine.learning import Adam


class Moments(NamedTuple):
    """Of arrays laid end to end: running means of the gradient and of its square, float32."""

    m: mx.array
    v: mx.array


def flat(arrays: Sequence[mx.array]) -> mx.array:
    return mx.concatenate([x.reshape(-1) for x in arrays])


def parts(whole: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """The opposite of `flat`: views of `whole` in the shapes of `like`."""
    ends = list(accumulate(x.size for x in like))
    return [x.reshape(old.shape) for x, old in zip(mx.split(whole, ends[:-1]), like, strict=True)]


def update(p: mx.array, g: mx.array, moments: Moments, step: int, adam: Adam) -> tuple[mx.array, Moments]:
    """The weights and moments after the step of this number (the first is 1), for gradients `g`."""
    m = adam.beta1 * moments.m + (1.0 - adam.beta1) * g
    v = adam.beta2 * moments.v + (1.0 - adam.beta2) * g.square()
    rate = adam.learning_rate / (1.0 - adam.beta1**step)
    root = (1.0 - adam.beta2**step) ** -0.5
    moved = p * (1.0 - adam.learning_rate * adam.weight_decay) - rate * m / (v.sqrt() * root + adam.eps)
    return moved, Moments(m, v)
