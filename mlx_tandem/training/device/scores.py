"""Micro-batches of reward models: the score head's product with the hidden states of tokens, in place of logprobs."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.training.device.backward import MicroBatch, Positions


class ScoredMicroBatch(MicroBatch):
    """Rows of tokens on their way through reward models.

    After `forward`, `logprobs`, `whole` and `plain` are the scores [n] at the positions of `where`. The head reads what
    the model's output head would read, whose logits are never computed.
    """

    def _head(self, h: mx.array, chunk: Positions, arrays: list[mx.array]) -> tuple[mx.array, mx.array, mx.array]:
        """Return the scores of a chunk three times, float32. `arrays` are A and B of each reward model's score head."""
        n = chunk.at.size
        with self._tree.bound(n, {}):
            hidden = self._tree.hidden(lambda: self._leave(h)).reshape(n, -1).astype(mx.float32)
        found = []
        for (adapter, _), head in zip(self._head_paths, arrays[::2], strict=True):
            span = self._adapters[adapter].span
            start, stop = max(span.start - chunk.first, 0), min(span.stop - chunk.first, n)
            if start < stop:  # a sum for each row, whose bits do not depend on how many there are
                found.append((hidden[start:stop] * head[:, 0]).sum(-1))
        scores = mx.concatenate(found)
        return scores, scores, scores
