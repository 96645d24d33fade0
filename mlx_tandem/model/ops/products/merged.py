"""Linears with a common input, computed as one product over their weights laid end to end.

A GPU takes a step's products one after the other, and on the host each costs as much as ten small operations: one
wide product is faster than three. The linears' own weights become views of the wide one; no memory is added.

Unquantised linears also multiply by a transposed view of their weights. A linear computes x @ weight.T. The transpose
costs a GPU nothing, but it is one more operation of every step, which costs the host as much as launching a small
kernel (docs/decisions/gpu-steps.md). So it is evaluated once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.modules import clone, kind_of, mix_in
from mlx_tandem.model.targets import Group

MOST_TOKENS = 512
"""Most tokens for which each linear is given its part of the wide product. With more, products hide their cost on
the host, and a part of a wide result has to be copied by whoever wants it alone."""

_PARAMETERS = ("weight", "scales", "biases", "bias")


class Merged:
    """Several linears as one, `linear`, whose outputs stand side by side."""

    def __init__(self, members: list[nn.Module]):
        """Lay the members' weights end to end; their arrays are views from here on."""
        self.members = members
        first: Any = members[0]
        self.linear: Any = clone(first)
        for name in _PARAMETERS:
            if name not in first:
                continue
            whole = mx.concatenate([member[name] for member in members], axis=0)
            mx.eval(whole)
            self.linear[name] = whole
            start = 0
            for member in members:
                end = start + member[name].shape[0]
                member[name] = whole[start:end]
                start = end
            mx.eval([member[name] for member in members])
        self._ends = list(accumulate(member["weight"].shape[0] for member in members))
        self._ready: dict[int, tuple[mx.array, mx.array]] = {}  # by member: an input, and the member's output for it

    def give_to_members(self, linear: nn.Module) -> Merged:
        """Make the members use `linear`, which has the same weights, through a copy of this object; return the copy.

        Earlier clones of the members still use this object.
        """
        other = copy(self)
        other.linear, other._ready = linear, {}
        for member in self.members:
            own: Any = member
            own._merged = other
        return other

    def whole(self, x: mx.array) -> mx.array:
        """Return the outputs of all members for x [..., inputs], side by side."""
        out: mx.array = self.linear(x)
        return out

    def joins(self, x: mx.array) -> bool:
        """Return whether `whole` is as fast as its parts would be. With many tokens, quantised linears are faster
        alone.
        """
        most = min(getattr(member, "_dequantise_from", MOST_TOKENS + 1) for member in self.members)
        return self.always_joins or x.size // x.shape[-1] < most

    @property
    def always_joins(self) -> bool:
        """Whether `whole` is as fast as its parts for any number of tokens."""
        return isinstance(self.linear, nn.Linear)

    def places(self, members: Iterable[nn.Module]) -> list[int]:
        """Return where the outputs of each of these members begin in a row of `whole`, and the length of such a row."""
        starts = dict(zip(map(id, self.members), [0, *self._ends], strict=False))
        return [*(starts[id(member)] for member in members), self._ends[-1]]

    def clear(self) -> None:
        """Forget outputs that the forward which is over did not ask for."""
        self._ready.clear()

    def part(self, member: int, x: mx.array) -> mx.array | None:
        """Return the output of one member; None if it has to compute that by itself."""
        if x.size // x.shape[-1] > MOST_TOKENS:
            return None
        given_for, given = self._ready.pop(member, (None, None))
        if given_for is x:
            return given
        parts = mx.split(self.whole(x), self._ends[:-1], axis=-1)
        self._ready = {i: (x, y) for i, y in enumerate(parts) if i != member}
        return parts[member]


class MergedMember:
    """Mixin of each linear that was merged."""

    _merged: Merged
    _place: int

    def __call__(self, x: mx.array) -> mx.array:
        """Return this linear's part of the wide product, or its own product."""
        y = self._merged.part(self._place, x)
        if y is None:
            y = super().__call__(x)  # type: ignore[misc]
        return y


def whole_of(linears: Iterable[nn.Module]) -> Merged | None:
    """Return the merged linear whose members are exactly these linears in this order; None if there is none."""
    linears = list(linears)
    merged: Merged | None = getattr(linears[0], "_merged", None)
    if merged is None or len(merged.members) != len(linears):
        return None
    return merged if all(a is b for a, b in zip(merged.members, linears, strict=True)) else None


def joined_product(linears: Sequence[nn.Module], x: mx.array) -> mx.array | None:
    """Return the outputs of these linears for x side by side, with their adapters; None if there is no such product.

    There is none if they are not merged, if one product is slower than theirs, or if some of them have adapters and
    the kernels for adapters do not compute all of them.
    """
    merged = whole_of(linears)
    if merged is None or not merged.joins(x):
        return None
    changed: list[Any] = [linear for linear in linears if getattr(linear, "is_changed", False)]
    if not changed:
        return merged.whole(x)
    joined: mx.array | None = changed[0].joined(x)
    return joined


def home_of(linears: Iterable[nn.Module]) -> Merged | None:
    """Return the merged linear that all of these linears are members of; None if there is none."""
    homes = {id(merged): merged for merged in (getattr(linear, "_merged", None) for linear in linears)}
    return homes.popitem()[1] if len(homes) == 1 else None


def merged_in(model: nn.Module) -> list[Merged]:
    """Return the merged linears of a model."""
    found = {id(m._merged): m._merged for m in model.modules() if isinstance(m, MergedMember)}
    return list(found.values())


def merge(groups: Iterable[Group]) -> list[Merged]:
    """Merge the linears of each group that can be: plain ones, or ones quantised in the same way."""
    merged = []
    for group in groups:
        members = [target.module for target in group]
        if len(members) > 1 and len({_kind(member) for member in members}) == 1 and _kind(members[0]):
            whole = Merged(members)
            for place, member in enumerate(members):
                own: Any = member
                own._merged, own._place = whole, place
                mix_in(member, MergedMember)
            merged.append(whole)
    return merged


def _kind(linear: Any) -> tuple[Any, ...]:
    """Return the properties that members must have in common; empty for a linear that cannot be merged."""
    arrays = tuple((name, linear[name].dtype, linear[name].shape[1:]) for name in _PARAMETERS if name in linear)
    if type(linear) is nn.Linear:
        return (nn.Linear, *arrays)
    if type(linear) is nn.QuantizedLinear:
        return (nn.QuantizedLinear, linear.bits, linear.group_size, linear.mode, *arrays)
    return ()


# --- Weights that are transposed once and not in every step ----------------------------------------------------------


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
    if kind_of(module) is nn.Linear:
        own: Any = module
        own._view = TransposedView(own["weight"])
        mix_in(module, TransposedLinear)
    return module
