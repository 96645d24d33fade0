"""Finds the linears of a model that get the very same input, such as q, k and v of a layer, or gate and up of its
MLP.

The model is run once, and the input of each linear is noted, so that no names of model families are needed. Nothing
is evaluated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.model.lora.adapted import Target, find_targets
from mlx_tandem.model.mixin import mix_in, unmix

Group = tuple[Target, ...]
"""Linears with a common input, in the order of their calls."""


def find_groups(model: nn.Module) -> list[Group]:
    """Return the groups of all linears that an adapter may change; each linear is in one group.

    A linear is alone if no other shares its input, if it has experts, and if a forward does not call it exactly
    once. A family may call its linears differently for inputs of other shapes: code that computes a group as a whole
    must check again whether its members got the same input.
    """
    targets = list(find_targets(model).values())
    calls: list[tuple[Target, Any]] = []
    with _listening(targets, calls):
        call: Any = model
        call(mx.zeros((1, 1), mx.int32))
    times = Counter(target.path for target, _ in calls)
    groups: dict[int, list[Target]] = {}
    for target, x in calls:  # `calls` keeps the inputs alive, so that no two of them have the same id
        if times[target.path] == 1 and not target.shape.experts:
            groups.setdefault(id(x), []).append(target)
    alone = [target for target in targets if times[target.path] != 1 or target.shape.experts]
    return [tuple(group) for group in groups.values()] + [(target,) for target in alone]


@contextmanager
def _listening(targets: Iterable[Target], calls: list[tuple[Target, Any]]) -> Iterator[None]:
    heard: list[tuple[Any, Target]] = [(target.module, target) for target in targets]
    for module, target in heard:
        module._heard_as, module._calls = target, calls
        mix_in(module, _Listening)
    try:
        yield
    finally:
        for module, _ in heard:
            unmix(module)
            del module._heard_as, module._calls


class _Listening:
    """Mixin of a linear that notes its calls."""

    _heard_as: Target
    _calls: list[tuple[Target, Any]]

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self._calls.append((self._heard_as, x))
        out: mx.array = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        return out
