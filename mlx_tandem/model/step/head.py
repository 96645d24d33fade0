"""Logits for the positions that are sampled, not for a whole prompt chunk."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.mixin import mix_in


class HeadSelector:
    """Makes the model's output head look at one position a row.

    The head (`lm_head`, or the embedding used as one) of a 152k vocabulary costs more than all layers of a small model
    over a chunk of which only the last position is sampled. Families whose head cannot be found compute all logits,
    and the position is taken afterwards.
    """

    def __init__(self, model: nn.Module):
        self._last: mx.array | None = None
        self._rows: mx.array | None = None  # until they have been picked
        self._adapt(model)

    @staticmethod
    def of(model: nn.Module) -> HeadSelector:
        """The model's selector; a model is adapted once."""
        selector = getattr(model, "_head_selector", None)
        if selector is None:
            selector = HeadSelector(model)
            object.__setattr__(model, "_head_selector", selector)
        return selector

    def select(self, last: mx.array | None, rows: mx.array | None = None) -> None:
        """Inside a traced step: last [rows] int32, the index of the sampled position in each row; None: all positions.
        rows: the indices of those that are sampled, all of one position; None: all rows.
        """
        self._last, self._rows = last, rows

    def logits(self, output: mx.array, last: mx.array) -> mx.array:
        """[sampled rows, vocabulary] of what the model returned since `select`."""
        if self._rows is not None:
            output = output[self._rows]
        if output.shape[1] == 1:
            return output[:, 0]
        return _pick(output, last)[:, 0]

    def narrow(self, h: mx.array) -> mx.array:
        """Of the head's input [rows, length, dim] what is wanted of it."""
        if h.ndim != 3:
            return h
        if self._rows is not None:
            h, self._rows = h[self._rows], None
        return h if self._last is None or h.shape[1] == 1 else _pick(h, self._last)

    def _adapt(self, model: nn.Module) -> None:
        for _, module in model.named_modules():
            head = module.get("lm_head") if isinstance(module, dict) else None
            if isinstance(head, nn.Module):
                self._override(head, NarrowHead)
                return
        for _, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)):
                self._override(module, NarrowEmbedding)

    def _override(self, head: Any, mixin: type) -> None:
        head._selector = self
        mix_in(head, mixin)


class NarrowHead:
    _selector: HeadSelector

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out: mx.array = super().__call__(self._selector.narrow(x), *args, **kwargs)  # type: ignore[misc]
        return out


class NarrowEmbedding:
    """Only where it is used as the head."""

    _selector: HeadSelector

    def as_linear(self, x: mx.array) -> mx.array:
        out: mx.array = super().as_linear(self._selector.narrow(x))  # type: ignore[misc]
        return out


def _pick(x: mx.array, last: mx.array) -> mx.array:
    return mx.take_along_axis(x, last[:, None, None], axis=1)
