"""Which linears of a model are given the very same input: q, k and v of a layer, say, or gate and up of its MLP.

Found by running the model once and looking at what each linear is called with, so that a family needs no names here.
Nothing is evaluated.
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
"""Linears with one input, in the order of their calls."""


def find_groups(model: nn.Module) -> list[Group]:
    """Of all that an adapter may change: each is in one group. Alone is one that nobody shares its input with, one of
    experts, and one that a forward calls never or twice.

    A family may call its linears differently for other shapes of input: whoever computes a group as a whole looks
    again whether its members got the same.
    """
    targets = list(find_targets(model).values())
    calls: list[tuple[Target, Any]] = []
    with _listening(targets, calls):
        call: Any = model
        call(mx.zeros((1, 1), mx.int32))
    times = Counter(target.path for target, _ in calls)
    groups: dict[int, list[Target]] = {}
    for target, x in calls:  # which keep the inputs alive, so that no two of them are at one address
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
    """Mixed into a linear while it is listened to."""

    _heard_as: Target
    _calls: list[tuple[Target, Any]]

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self._calls.append((self._heard_as, x))
        out: mx.array = super().__call__(x, *args, **kwargs)  # type: ignore[misc]
        return out
