"""Predicts the seconds that a prompt takes from coefficients that the engine measured.

It imports neither numpy nor MLX, so that the front can use it.
"""

from __future__ import annotations

from operator import mul


def prompt_seconds(form: tuple[float, ...], tokens: int, chunk: int) -> float:
    """Return the seconds that an otherwise idle device needs to read a prompt, `chunk` tokens at a time.

    `form`: `CostModel.form` of the device; empty when the device is unknown, which gives 0.
    """
    if not form:
        return 0.0
    starts = range(0, tokens, chunk)
    return 1e-3 * sum(sum(map(mul, form, features(min(chunk, tokens - at), at))) for at in starts)


def features(length: int, context: int) -> tuple[float, float, float, float]:
    """Return the features of a chunk, scaled to similar sizes for usual chunks: 256 tokens, 4,096 positions."""
    return 1.0, length / 256, length * (context + length / 2) / (256 * 4096), context / 4096
