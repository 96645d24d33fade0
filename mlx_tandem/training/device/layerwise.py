"""A model run layer by layer without knowing its family: entry, each layer, and from the last layer to the logits.

The model's own forward is run with layers that hand on what they get. That shows what reaches the first layer and with
which masks each layer is called. What comes after the last layer is computed by letting that one hand out given states.
Nothing that is not wanted is ever evaluated, since MLX computes only what is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.model.cache.states import arranged
from mlx_tandem.model.deterministic import Deterministic
from mlx_tandem.model.modules import mix_in

Layer = Callable[[mx.array], mx.array]


class _Call(NamedTuple):
    """A recorded call of a layer without its states, which are its first argument or the keyword argument `name`."""

    layer: Any
    name: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def takes(self, x: mx.array) -> bool:
        """Return whether an array is among the arguments beside the states."""
        return any(other is x for other in (*self.args, *self.kwargs.values()))

    def with_states(self, x: mx.array) -> mx.array:
        """Return what the layer computes for other states."""
        out: mx.array = (
            self.layer(x, *self.args, **self.kwargs)
            if self.name is None
            else self.layer(**{self.name: x}, **self.kwargs)
        )
        return out


class LayerwiseForward:
    """The forward of one model, in parts: `enter`, the layers, `leave`."""

    def __init__(self, model: Any, layers: list[Any], exact: Deterministic | None = None):
        """Prepare a model whose `layers` are called one after the other. `exact`: its arithmetic under
        `--deterministic`.
        """
        self._model = model
        self._exact = exact
        self._layers = layers
        self._given: mx.array | None = None  # what the last layer hands out
        self._calls: list[_Call] | None = None  # while a forward is recorded
        self._entry: mx.array | None = None
        for layer in layers:
            layer._forward = self
            mix_in(layer, Cut)

    def enter(self, tokens: mx.array, caches: list[Any] | None = None) -> tuple[mx.array, list[Layer]]:
        """Return the states [rows, length, dim] that reach the first layer, and the layers as functions of states.

        `caches`: one for each layer; None: each row is a whole sequence. Raises ValueError for a model that does not
        call its layers one after the other, or whose layers take more than one array of states.
        """
        calls = self._calls = []
        if caches is None and self._exact is not None:
            caches = arranged(self._model, self._exact.caches(len(tokens)), ())
        try:
            with self._within():
                if caches is None:
                    self._model(tokens)
                else:
                    self._model(tokens, cache=caches)
            entry, self._entry = self._entry, None
        finally:
            self._calls = None
        if entry is None or [id(call.layer) for call in calls] != [id(layer) for layer in self._layers]:
            raise ValueError("this model does not call its layers one after the other")
        if any(call.takes(entry) for call in calls):
            raise ValueError("a layer takes more than one array of states")
        return entry, [partial(self._run, call) for call in calls]

    def _run(self, call: _Call, x: mx.array) -> mx.array:
        """Return the output of a layer for the hidden states x."""
        with self._within():
            return call.with_states(x)

    def _within(self) -> AbstractContextManager[None]:
        return nullcontext() if self._exact is None else self._exact.within()

    def leave(self, states: mx.array) -> mx.array:
        """Return the logits [1, n, vocabulary], float32, of states [n, dim] behind the last layer."""
        self._given, self._calls = states[None], []
        try:
            with self._within():
                logits: mx.array = self._model(mx.zeros((1, 1), mx.int32))
        finally:
            self._given = self._calls = None
        return logits.astype(mx.float32)

    def pass_on(self, x: mx.array, call: _Call) -> mx.array | None:
        """Return what a layer that is called with the states `x` hands out instead of computing; None: it computes."""
        if self._calls is None:
            return None
        if self._given is not None:
            return self._given if call.layer is self._layers[-1] else x
        if self._entry is None:
            self._entry = x
        self._calls.append(call)
        return x


class Cut:
    """A layer that hands on what it gets while its forward is being recorded or left."""

    _forward: LayerwiseForward

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """Return what the layer computes, or what its forward has it hand on."""
        name = None if args else next(iter(kwargs))
        x = args[0] if name is None else kwargs[name]
        rest = {key: value for key, value in kwargs.items() if key != name}
        handed = self._forward.pass_on(x, _Call(self, name, args[1:], rest))
        out: mx.array = super().__call__(*args, **kwargs) if handed is None else handed  # type: ignore[misc]
        return out
