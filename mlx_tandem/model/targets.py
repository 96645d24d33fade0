"""The linears of a model that an adapter can change, and which of them get the very same input.

Linears with a common input are q, k and v of a layer, or gate and up of its MLP. The calls of a linear that was changed
are sent to the object that adds the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP

from mlx_tandem.adapters.formats import LinearShape
from mlx_tandem.model.modules import mix_in, unmix

Halves = npt.NDArray[np.float32]
"""A or B of an adapter, on the host."""

_NEVER_CALLED = "_res_proj"
"""End of the names of linears whose weights a layer reads without calling them, so that no delta could be added."""


@dataclass(frozen=True, eq=False)
class Cut:
    """What one of several ranks has of a linear: numbers of its outputs, or a part of its inputs; None: all of them."""

    whole: LinearShape
    outputs: npt.NDArray[np.int32] | None
    inputs: slice | None

    def of(self, a: Halves, b: Halves) -> tuple[Halves, Halves]:
        """Return this rank's parts of A [inputs, r] and B [r, outputs], or of the same with experts as first axis."""
        own_a = a if self.inputs is None else np.ascontiguousarray(a[..., self.inputs, :])
        return own_a, b if self.outputs is None else np.ascontiguousarray(b[..., self.outputs])


@dataclass(frozen=True, eq=False)
class Target:
    """One linear of a model, or one with a matrix per expert (`shape.experts`), or its output head."""

    path: str
    module: nn.Module
    shape: LinearShape
    is_head: bool = False

    @property
    def cut(self) -> Cut | None:
        """What this rank has of the linear, where several ranks compute the model; None: all."""
        return getattr(self.module, "_cut", None)

    @property
    def whole(self) -> LinearShape:
        """The shape of the linear in folders of adapters."""
        return self.shape if self.cut is None else self.cut.whole


class Deltas(Protocol):
    """The object that adds adapters to the outputs of a model's linears."""

    def dense(self, target: Target, x: mx.array, plain: Callable[[mx.array], mx.array]) -> mx.array:
        """Return plain(x) + delta, the output of the linear for x [..., inputs]."""

    def changes(self, target: Target) -> bool:
        """Return whether the linear has an adapter in this forward."""

    def joined(self, target: Target, x: mx.array) -> mx.array | None:
        """Return the outputs for x, with their adapters, of all linears that were merged with this one, side by side.

        None if they have to be computed one by one.
        """

    def switch(self, target: Target, x: mx.array, y: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """Return y + delta for a linear of experts that gave y for x, whose entry i went through expert indices[i].

        `in_order` says that the entries are sorted by expert.
        """


def find_targets(model: nn.Module) -> dict[str, Target]:
    """Return all linears that can be adapted, by path.

    A module reachable by two paths counts under the first. The output head is left out: `find_head` finds it.
    """
    blocks = {id(c) for m in model.modules() if isinstance(m, (SwitchGLU, SwitchMLP)) for c in m.children().values()}
    found: dict[str, Target] = {}
    seen: set[int] = set()
    # named_modules goes last child first; logs and errors read better in the model's own order.
    for path, module in reversed(model.named_modules()):
        if id(module) in seen or path.rpartition(".")[2] == "lm_head" or path.endswith(_NEVER_CALLED):
            continue
        shape = None
        if isinstance(module, nn.Linear):
            shape = LinearShape(module.weight.shape[1], module.weight.shape[0])
        elif isinstance(module, nn.QuantizedLinear):
            shape = LinearShape(module.weight.shape[1] * 32 // module.bits, module.weight.shape[0])
        elif isinstance(module, (SwitchLinear, QuantizedSwitchLinear)) and id(module) in blocks:
            shape = LinearShape(module.input_dims, module.output_dims, module.num_experts)
        if shape is not None:
            seen.add(id(module))
            found[path] = Target(path, module, shape)
    return found


def find_head(model: nn.Module) -> Target | None:
    """Return the model's output head: its `lm_head`, or the one embedding of a model that uses it as the head.

    The path is the one that PEFT has for it, `lm_head` in both cases. None for a model of neither kind.
    """
    modules = model.named_modules()
    for path, module in modules:
        if path.rpartition(".")[2] == "lm_head" and isinstance(module, (nn.Linear, nn.QuantizedLinear)):
            return Target(path, module, _head_shape(module), True)
    tables = [(p, m) for p, m in modules if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding))]
    if len(tables) != 1 or any(path.rpartition(".")[2] == "lm_head" for path, _ in modules):
        return None
    path, table = tables[0]
    return Target(".".join([*path.split(".")[:-2], "lm_head"]), table, _head_shape(table), True)


def _head_shape(module: Any) -> LinearShape:
    outputs, inputs = module.weight.shape
    packed = isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return LinearShape(inputs * 32 // module.bits if packed else inputs, outputs)


def adapt(target: Target, deltas: Deltas) -> None:
    """Send the linear's calls through `deltas` from here on."""
    module: Any = target.module
    module._deltas, module._target = deltas, target
    table = isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
    mix_in(module, AdaptedSwitch if target.shape.experts else AdaptedTable if table else AdaptedDense)


class AdaptedDense:
    """Mixin of a linear that has an adapter in some slot."""

    _deltas: Deltas
    _target: Target

    def __call__(self, x: mx.array) -> mx.array:
        """Return the linear's output with each row's adapter."""
        return self._deltas.dense(self._target, x, self.plain)

    @property
    def is_changed(self) -> bool:
        """Whether the linear has an adapter in this forward."""
        return self._deltas.changes(self._target)

    def joined(self, x: mx.array) -> mx.array | None:
        """Return the outputs, with their adapters, of all linears that were merged with this one, side by side.

        None if they have to be computed one by one.
        """
        return self._deltas.joined(self._target, x)

    def plain(self, x: mx.array) -> mx.array:
        """Return the output of the linear without adapters."""
        out: mx.array = super().__call__(x)  # type: ignore[misc]
        return out


class AdaptedTable:
    """Mixin of an embedding that is the output head, too, and has an adapter as such in some slot."""

    _deltas: Deltas
    _target: Target

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits with each row's adapter."""
        return self._deltas.dense(self._target, x, self.plain)

    def plain(self, x: mx.array) -> mx.array:
        """Return the logits without adapters."""
        out: mx.array = super().as_linear(x)  # type: ignore[misc]
        return out


class AdaptedSwitch:
    """Mixin of a linear of experts that has an adapter in some slot."""

    _deltas: Deltas
    _target: Target

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return the linear's output with each row's adapter."""
        y = super().__call__(x, indices, sorted_indices=sorted_indices)  # type: ignore[misc]
        return self._deltas.switch(self._target, x, y, indices, sorted_indices)


Group = tuple[Target, ...]
"""Linears with a common input, in the order of their calls."""


def find_groups(model: nn.Module) -> list[Group]:
    """Return the groups of all linears that an adapter may change; each linear is in one group.

    The model is run once, and the input of each linear is noted, so that no names of model families are needed. Nothing
    is evaluated. A linear is alone if no other shares its input, if it has experts, and if a forward does not call it
    exactly once. A family may call its linears differently for inputs of other shapes: code that computes a group as a
    whole must check again whether its members got the same input.
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
