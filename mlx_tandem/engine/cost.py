"""What a prompt chunk will cost, learned from what chunks have cost on this device."""

from __future__ import annotations

import numpy as np

LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Chunk lengths the runner pads to: few, so that each is traced once."""


def padded_length(tokens: int) -> int:
    for n in LENGTHS:
        if n >= tokens:
            return n
    return -(-tokens // LENGTHS[-1]) * LENGTHS[-1]


class CostModel:
    """milliseconds ≈ a + b·length + c·length·context + d·context, by recursive least squares with forgetting.

    `context` counts the positions before the chunk. A chunk deep in a long context costs ten times one at its start,
    so a budget in tokens would stall the streams that decode beside it.
    """

    def __init__(self, forgetting: float = 0.98):
        self._weights = np.array([0.5, 5.0, 5.0, 0.5])  # a slow machine, until it is known better
        self._covariance = np.eye(4) * 10.0
        self._forgetting = forgetting
        self.decode_ms = 0.0

    def observe_decode(self, milliseconds: float) -> None:
        """A step without prompt chunks took this long."""
        self.decode_ms = milliseconds if not self.decode_ms else 0.9 * self.decode_ms + 0.1 * milliseconds

    def observe_chunks(self, chunks: list[tuple[int, int]], milliseconds: float) -> None:
        """These (length, context) together took this long."""
        x = sum((_features(*chunk) for chunk in chunks), np.zeros(4))
        gain = self._covariance @ x
        gain /= self._forgetting + x @ gain
        self._weights = np.maximum(self._weights + gain * (milliseconds - self._weights @ x), 0.0)
        self._covariance -= np.outer(gain, x @ self._covariance)
        if np.trace(self._covariance) < 1e4:  # forgetting without news would let it grow without bound
            self._covariance /= self._forgetting

    def predict(self, length: int, context: int) -> float:
        return float(self._weights @ _features(length, context))

    def affordable(self, context: int, milliseconds: float, longest: int) -> int:
        """The longest padded length up to `longest` that is predicted to fit, at least the shortest."""
        best = LENGTHS[0]
        for n in LENGTHS:
            if n > longest or self.predict(n, context) > milliseconds:
                break
            best = n
        return best


def _features(length: int, context: int) -> np.ndarray:
    """Scaled to be of one size over usual chunks: 256 tokens, 4,096 positions."""
    return np.array([1.0, length / 256, length * (context + length / 2) / (256 * 4096), context / 4096])
