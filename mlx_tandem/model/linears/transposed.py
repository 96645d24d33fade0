"""Linears whose weights are transposed once and not in every step.

MLX multiplies by the transposed weight. Transposing takes no time on a GPU, but as an operation of a step it costs the
host as much as a small kernel (docs/decisions/gpu-steps.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.clone import clone
from mlx_tandem.model.linears.merged import Merged
from mlx_tandem.model.mixin import mix_in


class View:
    """The transposed view of a weight, which shares the weight's memory. It is not a parameter of its module."""

    def __init__(self, weight: mx.array):
        self.weight = weight
        self.transposed = weight.T
        mx.eval(self.transposed)


class TransposedLinear:
    """Mixin of an unquantised linear that multiplies by the view."""

    _view: View

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output."""
        own: Any = self
        if own["weight"] is not self._view.weight:  # the weight was replaced
            output: mx.array = super().__call__(x)  # type: ignore[misc]
            return output
        y: mx.array = mx.addmm(own["bias"], x, self._view.transposed) if "bias" in own else x @ self._view.transposed
        return y


def use_views(model: nn.Module, merged: Iterable[Merged]) -> list[Merged]:
    """Have the unquantised linears of a model multiply by views from here on, the merged ones among them.

    A clone of the model that was made before keeps its linears. Return the merged linears that the model then uses.
    """
    merged = list(merged)
    parts = {id(member) for one in merged for member in one.members}
    for module in model.modules():
        if id(module) not in parts:
            _view(module)
    return [one.give_to_members(_view(clone(one.linear))) for one in merged]


def _view(module: nn.Module) -> nn.Module:
    """Have a module multiply by a view if it is an unquantised linear; return it."""
    if type(module) is nn.Linear:
        own: Any = module
        own._view = View(own["weight"])
        mix_in(module, TransposedLinear)
    return module
