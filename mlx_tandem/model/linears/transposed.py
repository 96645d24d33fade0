"""Linears whose weights are transposed once and not in every step.

A linear computes x @ weight.T. The transpose costs a GPU nothing, but it is one more operation of every step, which
costs the host as much as launching a small kernel (docs/decisions/gpu-steps.md). So it is evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.linears.merged import Merged
from mlx_tandem.model.modules import clone, mix_in


class TransposedView:
    """The transposed view of a weight, which shares the weight's memory. It is not a parameter of its module."""

    def __init__(self, weight: mx.array):
        self.weight = weight
        self.transposed = weight.T
        mx.eval(self.transposed)


class TransposedLinear:
    """Mixin of an unquantised linear that multiplies by the view."""

    _view: TransposedView

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output."""
        own: Any = self
        if own["weight"] is not self._view.weight:  # the weight was replaced
            output: mx.array = super().__call__(x)  # type: ignore[misc]
            return output
        y: mx.array = mx.addmm(own["bias"], x, self._view.transposed) if "bias" in own else x @ self._view.transposed
        return y


def use_views(model: nn.Module, merged: Iterable[Merged]) -> list[Merged]:
    """Make all unquantised linears of a model, merged ones included, multiply by transposed views that are made now.

    Earlier clones of the model are not changed. Return the merged linears that the model then uses.
    """
    merged = list(merged)
    parts = {id(member) for one in merged for member in one.members}
    for module in model.modules():
        if id(module) not in parts:
            _view(module)
    return [one.give_to_members(_view(clone(one.linear))) for one in merged]


def _view(module: nn.Module) -> nn.Module:
    """Make a module multiply by a view if it is an unquantised linear; return it."""
    if type(module) is nn.Linear:
        own: Any = module
        own._view = TransposedView(own["weight"])
        mix_in(module, TransposedLinear)
    return module
