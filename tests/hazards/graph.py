"""The graph of what is launched while nothing has been waited for, as MLX would hand it to Metal.

`mx.export_function` records what a function computes from its arrays, by the names of MLX's own operations. Within it
`mx.fast.metal_kernel` works without Metal: it is recorded, with the text that Metal would compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import mlx.core as mx
import pytest

from mlx_tandem.model.kernels.dialect import Source


@dataclass(frozen=True)
class Op:
    """An operation on arrays, which are known by their names."""

    name: str  # MLX's, or the kernel's
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes: tuple[str, ...] = ()  # inputs that a kernel writes all the same
    cuts: bool = False  # whether it leaves out, repeats or moves parts of the lines of its input


@dataclass(frozen=True)
class Evaluation:
    """A call of `mx.async_eval`, or of `mx.eval`, which `waits`. Without arrays: `mx.synchronize`."""

    arrays: tuple[str, ...]
    waits: bool


@dataclass(frozen=True)
class Graph:
    """`ops` in an order in which they can be computed; `labels` of the arrays that were there before; `called`: by the
    names of kernels that write inputs, how often they were called, whether anything is made of their outputs or not."""

    ops: tuple[Op, ...]
    labels: Mapping[str, str]
    evaluations: tuple[Evaluation, ...]
    called: Mapping[str, int]
    arrays: Mapping[str, tuple[tuple[int, ...], mx.Dtype]] = field(default_factory=dict)
    """Shape and type of each array by its name."""

    def nbytes(self, array: str) -> int:
        shape, dtype = self.arrays[array]
        return prod(shape) * dtype.size


Sources = Mapping[tuple[str, int], Source]
"""By name and number of inputs."""

CUTS = {"AsStrided", "Broadcast", "BroadcastAxes", "Split", "Transpose"}
"""Operations whose results may not be laid out line by line. `Slice` is one unless it takes whole lines."""


def record(
    work: Callable[[dict[str, mx.array]], None],
    state: Mapping[str, mx.array],
    sources: Sources,
    called: Mapping[str, int],
    patch: pytest.MonkeyPatch,
) -> Graph:
    """Record what `work` evaluates when it is given arrays like those of `state` in their place. What is asked of MLX
    then is noted and not computed. `called` is what `work` leaves there."""
    messages: list[dict[str, Any]] = []
    asked: list[tuple[int, bool]] = []

    def traced(*arrays: mx.array) -> list[mx.array]:
        evaluated: list[mx.array] = []

        def note(waits: bool) -> Callable[..., None]:
            def called(*wanted: Any) -> None:
                found = list(flat(wanted))
                evaluated.extend(map(mx.stop_gradient, found))  # as they are now: items may be assigned to them later
                asked.append((len(found), waits))

            return called

        with patch.context() as own:
            own.setattr(mx, "async_eval", note(False))
            own.setattr(mx, "eval", note(True))
            own.setattr(mx, "synchronize", note(True))
            own.setattr(mx, "contiguous", _contiguous)
            work(dict(zip(state, arrays, strict=True)))
        return evaluated

    mx.export_function(messages.append, traced, *state.values())
    by_type: dict[str, list[dict[str, Any]]] = {}
    for message in messages:
        by_type.setdefault(message["type"], []).append(message)
    (inputs,), (outputs,) = by_type["inputs"], by_type["outputs"]
    names = iter(_names(outputs["outputs"]))
    return Graph(
        tuple(_op(message, sources) for message in by_type["primitive"]),
        dict(zip(_names(inputs["inputs"]), state, strict=True)),
        tuple(Evaluation(tuple(next(names) for _ in range(count)), waits) for count, waits in asked),
        dict(called),
        {name: (shape, dtype) for m in by_type["primitive"] for name, shape, dtype in (*m["inputs"], *m["outputs"])},
    )


def flat(arrays: Any) -> list[mx.array]:
    """Return the arrays of lists and dictionaries of them."""
    if isinstance(arrays, mx.array):
        return [arrays]
    return [x for each in (arrays.values() if isinstance(arrays, dict) else arrays) for x in flat(each)]


def _contiguous(x: mx.array, allow_col_major: bool = False) -> mx.array:
    """Return what `mx.contiguous` returns, which cannot be recorded, by operations that copy and share alike."""
    return mx.unflatten(mx.flatten(x), 0, x.shape)


def _names(arrays: Sequence[tuple[str, Any, Any]]) -> tuple[str, ...]:
    return tuple(name for name, *_ in arrays)


def _op(message: Mapping[str, Any], sources: Sources) -> Op:
    name, inputs, outputs = message["name"], _names(message["inputs"]), _names(message["outputs"])
    if name == "Slice":
        (_, before, _), (_, after, _) = message["inputs"][0], message["outputs"][0]
        return Op(name, inputs, outputs, cuts=before[1:] != after[1:])
    if name != "CustomKernel":
        return Op(name, inputs, outputs, cuts=name in CUTS)
    full = message["arguments"][0]
    source = max(
        (s for (own, count), s in sources.items() if count == len(inputs) and full.startswith(f"custom_kernel_{own}_")),
        key=lambda s: len(s.name),
    )
    written = tuple(array for own, array in zip(source.inputs, inputs, strict=True) if own in source.writes)
    return Op(source.name, inputs, outputs, written)
