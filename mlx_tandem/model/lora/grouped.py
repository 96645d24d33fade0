"""The deltas of all linears of one input by two fused kernels, computed when the first of them is called.

The kernels add to the linears' own outputs, so that call computes these for all members; each of the others is then
given what is its own, if it was called with the same input.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import mlx.core as mx

from mlx_tandem.model.kernels.lora import MOST_MEMBERS, LoraKernels, fits
from mlx_tandem.model.linears.groups import Group
from mlx_tandem.model.linears.merged import home_of
from mlx_tandem.model.lora.adapted import Target

Stacked = Mapping[str, tuple[mx.array, mx.array]]
"""By path: A [slots, inputs, rank] and B [slots, rank, outputs]."""


class GroupedDeltas:
    """Between `start` and `stop` the adapted linears of one trace are given their sums by `give`.

    `same` and `mixed`: the tokens up to which a step of one adapter, or of several, is computed so.
    """

    def __init__(self, kernels: LoraKernels, groups: Iterable[Group], *, same: int, mixed: int):
        self.same, self.mixed = same, mixed
        self._kernels = kernels
        self._groups = list(groups)
        self._members: dict[str, Group] = {}
        self._tiles: mx.array | None = None
        self._tokens = 0
        self._stacked: Stacked = {}
        self._ready: dict[str, tuple[mx.array, mx.array]] = {}  # by path: an input, and what its linear gives for it

    def adapted(self, paths: Container[str]) -> None:
        """From here on these linears have adapters."""
        self._members = {}
        for group in self._groups:
            own = [
                t for t in group if t.path in paths and not t.shape.experts and fits(t.shape.inputs, t.shape.outputs)
            ]
            for at in range(0, len(own), MOST_MEMBERS):
                members = tuple(own[at : at + MOST_MEMBERS])
                self._members |= {member.path: members for member in members}

    def start(self, tiles: mx.array, tokens: int, stacked: Stacked) -> None:
        """The tokens of the inputs that follow are cut into `tiles`."""
        self._tiles, self._tokens, self._stacked = tiles, tokens, stacked

    def stop(self) -> None:
        self._tiles, self._stacked = None, {}
        self._ready.clear()

    def give(self, target: Target, x: mx.array) -> mx.array | None:
        """What the linear gives for x with its adapters; None when that is not for these kernels to compute."""
        given_for, given = self._ready.pop(target.path, (None, None))
        if given is not None and given_for is x:
            return given
        members = self._members.get(target.path)
        if members is None or self._tiles is None or x.size != self._tokens * target.shape.inputs:
            return None
        if given is not None:
            members = (target,)  # this forward calls them with inputs of their own
        modules: list[Any] = [member.module for member in members]
        own, places = _own(modules, x)
        a, b = zip(*(self._stacked[member.path] for member in members), strict=True)
        if any(array.dtype != x.dtype for array in (*a, *b, *own)):
            return None
        added = self._kernels.add(x, self._tiles, a, b, own, places)
        self._ready |= {member.path: (x, z) for member, z in zip(members, added, strict=True)}
        return self._ready.pop(target.path)[1]


def _own(modules: list[Any], x: mx.array) -> tuple[list[mx.array], tuple[int, ...] | None]:
    """What the linears give by themselves: an array each, or one with their places in it."""
    merged = home_of(modules)
    if merged is not None and merged.joins(x):
        places = merged.places(modules)
        if all(place % 8 == 0 for place in places):
            return [merged.whole(x)], tuple(places)
    return [module.plain(x) for module in modules], None
