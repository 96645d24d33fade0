"""The deltas of all linears with a common input, computed by two fused kernels when the first of the linears is
called.

The kernels add to the linears' own outputs, so the first call computes these for all members of the group. Each of
the others is then given its own result if it is called with the same input.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import mlx.core as mx

from mlx_tandem.model.kernels.lora import MOST_MEMBERS, LoraKernels, fits
from mlx_tandem.model.ops.products.merged import home_of, whole_of
from mlx_tandem.model.targets import Group, Target

Stacked = Mapping[str, tuple[mx.array, mx.array]]
"""The stacked arrays by path: A [slots, inputs, rank] and B [slots, rank, outputs]."""


class GroupedDeltas:
    """Fused deltas of adapted linears: between `start` and `stop`, `give` returns the sums for one trace of a step.

    `same` and `mixed` are the numbers of tokens up to which a step with one adapter, or with several, uses the
    kernels.
    """

    def __init__(self, kernels: LoraKernels, groups: Iterable[Group], *, same: int, mixed: int):
        self.same, self.mixed = same, mixed
        self.kernels = kernels
        self._groups = list(groups)
        self._members: dict[str, Group] = {}
        self._tiles: mx.array | None = None
        self._tokens = 0
        self._stacked: Stacked = {}
        self._ready: dict[str, tuple[mx.array, mx.array]] = {}  # by path: an input, and the linear's output for it

    def adapted(self, paths: Container[str]) -> None:
        """Set which linears have adapters from here on."""
        self._members = {}
        for group in self._groups:
            own = [
                t for t in group if t.path in paths and not t.shape.experts and fits(t.shape.inputs, t.shape.outputs)
            ]
            for at in range(0, len(own), MOST_MEMBERS):
                members = tuple(own[at : at + MOST_MEMBERS])
                self._members |= {member.path: members for member in members}

    def start(self, tiles: mx.array, tokens: int, stacked: Stacked) -> None:
        """Begin a trace whose inputs have `tokens` tokens, cut into `tiles`."""
        self._tiles, self._tokens, self._stacked = tiles, tokens, stacked

    def stop(self) -> None:
        """End the trace and forget its arrays."""
        self._tiles, self._stacked = None, {}
        self._ready.clear()

    def give(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the output of the linear for x with its adapters; None if these kernels do not compute it."""
        given_for, given = self._ready.pop(target.path, (None, None))
        if given is not None and given_for is x:
            return given
        members = self._members.get(target.path)
        if members is None or self._tiles is None or not self._covers(target, x):
            return None
        if given is not None:
            members = (target,)  # this forward calls the members with different inputs
        modules: list[Any] = [member.module for member in members]
        own, places = _own(modules, x)
        a, b = self._pairs(members)
        if any(array.dtype != x.dtype for array in (*a, *b, *own)):
            return None
        added = self.kernels.add(x, self._tiles, a, b, own, places)
        self._ready |= {member.path: (x, z) for member, z in zip(members, added, strict=True)}
        return self._ready.pop(target.path)[1]

    def joined(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the outputs for x, with their adapters, of all linears that were merged with this one, side by side.

        None if these kernels do not compute all of them, for example because some have no adapter in any slot.
        """
        members = self._members.get(target.path)
        if members is None or self._tiles is None or not self._covers(target, x):
            return None
        merged = whole_of([member.module for member in members])
        if merged is None:
            return None
        own = merged.whole(x)
        a, b = self._pairs(members)
        if any(array.dtype != x.dtype for array in (*a, *b, own)):
            return None
        return self.kernels.add_joined(x, self._tiles, a, b, own)

    def _covers(self, target: Target, x: mx.array) -> bool:
        """Return whether x has as many tokens as the tiles of this trace cover."""
        return x.size == self._tokens * target.shape.inputs

    def _pairs(self, members: Group) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Return the stacked A of these linears, and their stacked B."""
        a, b = zip(*(self._stacked[member.path] for member in members), strict=True)
        return a, b


def _own(modules: list[Any], x: mx.array) -> tuple[list[mx.array], tuple[int, ...] | None]:
    """Return the linears' own outputs: an array each and None, or one array that holds all and their places in it."""
    merged = home_of(modules)
    if merged is not None and merged.joins(x):
        places = merged.places(modules)
        if all(place % 8 == 0 for place in places):
            return [merged.whole(x)], tuple(places)
    return [module.plain(x) for module in modules], None
