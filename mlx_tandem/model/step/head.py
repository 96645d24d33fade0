"""The selection of the positions for which the output head computes logits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.mixin import mix_in


class HeadSelector:
    """A wrapper of the model's output head that computes the logits of one position per row.

    For a chunk of which only the last position is sampled, the head (`lm_head`, or the embedding used as one) of a
    vocabulary of 152k costs more than all layers of a small model. Families whose head cannot be found compute all
    logits, and the position is selected afterwards.
    """

    def __init__(self, model: nn.Module):
        self._last: mx.array | None = None
        self._rows: mx.array | None = None  # None once they have been picked
        self._adapt(model)

    @staticmethod
    def of(model: nn.Module) -> HeadSelector:
        """Return the selector of a model, which is adapted once."""
        selector = getattr(model, "_head_selector", None)
        if selector is None:
            selector = HeadSelector(model)
            object.__setattr__(model, "_head_selector", selector)
        return selector

    def select(self, last: mx.array | None, rows: mx.array | None = None) -> None:
        """Set what the head computes in the forward that is being traced.

        last: [rows] int32, the index of the sampled position in each row; None: all positions. rows: the indices of the
        rows that are sampled, all of which have one position; None: all rows.
        """
        self._last, self._rows = last, rows

    def logits(self, output: mx.array, last: mx.array) -> mx.array:
        """Return [sampled rows, vocabulary] of the output that the model returned since `select`."""
        if self._rows is not None:
            output = output[self._rows]
        if output.shape[1] == 1:
            return output[:, 0]
        return _pick(output, last)[:, 0]

    def narrow(self, h: mx.array) -> mx.array:
        """Return the selected rows and positions of the head's input [rows, length, dim]."""
        if h.ndim != 3:
            return h
        if self._rows is not None:
            h, self._rows = h[self._rows], None
        return h if self._last is None or h.shape[1] == 1 else _pick(h, self._last)

    def _adapt(self, model: nn.Module) -> None:
        """Wrap the model's `lm_head`, or all of its embeddings if it has none."""
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
    """The mix-in for an `lm_head`, which narrows its input."""

    _selector: HeadSelector

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Return the logits of the selected positions of x [rows, length, dim]."""
        out: mx.array = super().__call__(self._selector.narrow(x), *args, **kwargs)  # type: ignore[misc]
        return out


class NarrowEmbedding:
    """The mix-in for an embedding, which narrows its input where it is used as the head."""

    _selector: HeadSelector

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits of the selected positions of x [rows, length, dim]."""
        out: mx.array = super().as_linear(self._selector.narrow(x))  # type: ignore[misc]
        return out


def _pick(x: mx.array, last: mx.array) -> mx.array:
    return mx.take_along_axis(x, last[:, None, None], axis=1)
