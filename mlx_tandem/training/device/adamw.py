"""AdamW on many small arrays laid end to end as one, so that a step is a few operations and not hundreds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.engine.learning import AdamParams


class Moments(NamedTuple):
    """Running means of the gradient and of its square, float32, of arrays laid end to end."""

    m: mx.array
    v: mx.array


ALIGNED = 128
"""Each array begins at a multiple of so many numbers. Products of matrices read arrays where they lie, also in 16 bits,
and cuBLAS expects addresses that are multiples of 256 bytes."""


def flat(arrays: Sequence[mx.array]) -> mx.array:
    """Return the arrays laid end to end, with zeros between them where alignment needs them."""
    pieces: list[mx.array] = []
    for x in arrays:
        pieces.append(x.reshape(-1))
        if x.size % ALIGNED:
            pieces.append(mx.zeros((-x.size % ALIGNED,), x.dtype))
    return mx.concatenate(pieces)


def parts(whole: mx.array, like: Sequence[mx.array]) -> list[mx.array]:
    """Return views of `whole` in the shapes of `like`; the inverse of `flat`."""
    pieces = mx.split(whole, ends(x.size for x in like)[:-1])
    return [
        (x if x.size == old.size else x[: old.size]).reshape(old.shape) for x, old in zip(pieces, like, strict=True)
    ]


def ends(sizes: Iterable[int]) -> list[int]:
    """Return where each of arrays of these sizes, and the zeros behind it, ends in `flat`."""
    return list(accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes))


def update(
    p: mx.array, g: mx.array, moments: Moments, step: int, adam: AdamParams, ratio: mx.array | float = 1.0
) -> tuple[mx.array, Moments]:
    """Return weights and moments after step number `step`, from 1 on, with gradients `g`.

    The learning rate of each weight is that of `adam` times its `ratio`.
    """
    m = adam.beta1 * moments.m + (1.0 - adam.beta1) * g
    v = adam.beta2 * moments.v + (1.0 - adam.beta2) * g.square()
    learning_rate = adam.learning_rate * ratio
    rate = learning_rate / (1.0 - adam.beta1**step)
    root = (1.0 - adam.beta2**step) ** -0.5
    moved = p * (1.0 - learning_rate * adam.weight_decay) - rate * m / (v.sqrt() * root + adam.eps)
    return moved, Moments(m, v)
