"""The adapters of one linear, stacked over the slots."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.adapters.formats import LinearShape


class Stack:
    """Arrays `a` [slots + 1, inputs, r] and `b` [slots + 1, r, outputs] of one linear; with experts, [slots + 1,
    experts, …].

    Slot 0 is the base and stays zero. The arrays begin as zeros, or with the contents of `old`, a stack of smaller
    rank.
    """

    def __init__(self, shape: LinearShape, slots: int, rank: int, dtype: mx.Dtype, old: Stack | None):
        lead = (slots + 1, shape.experts) if shape.experts else (slots + 1,)
        self.a = mx.zeros((*lead, shape.inputs, rank), dtype)
        self.b = mx.zeros((*lead, rank, shape.outputs), dtype)
        if old is not None:
            known = old.a.shape[-1]
            self.a[..., :known] = old.a
            self.b[..., :known, :] = old.b
        mx.eval(self.a, self.b)  # now, so that only one old stack at a time lives beside its successor

    def contents(self, pair: tuple[mx.array, mx.array] | None) -> tuple[mx.array, mx.array]:
        """Return A and B as a whole slot has to hold them, padded with zeros so that nothing of an evicted adapter
        stays.

        `pair` may hold the bits of the arrays' type as integers; None stands for the base.
        """
        if pair is None:
            return mx.zeros(self.a.shape[1:], self.a.dtype), mx.zeros(self.b.shape[1:], self.b.dtype)
        rank = self.a.shape[-1]
        return _widened(pair[0].view(self.a.dtype), -1, rank), _widened(pair[1].view(self.b.dtype), -2, rank)


def _widened(x: mx.array, axis: int, size: int) -> mx.array:
    """Return `x` with zeros appended along `axis` up to `size`."""
    missing = size - x.shape[axis]
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return mx.pad(x, widths) if missing else x
