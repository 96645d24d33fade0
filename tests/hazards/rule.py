"""What MLX's Metal back end does with a graph: which buffers each operation uses, and what is not ordered or copied.

The rules are those of MLX 0.32.2:

- Some operations only give a buffer another shape (`eval_gpu` in mlx/backend/gpu/primitives.cpp): nothing runs, and
  who uses the result uses the buffer. That holds for `Depends`, too: it orders the host's work and not the device's.
- Every other operation is a dispatch, with its inputs' buffers as inputs and a new buffer for each output. So is a
  kernel of ours (`CustomKernel::eval_gpu` in mlx/backend/metal/custom_kernel.cpp), whatever it writes besides. An input
  that is not laid out line by line may be copied before, in a dispatch of its own.
- `Concatenate` is a dispatch for each input, of which none waits for what another waits for (`concatenate_gpu` in
  mlx/backend/metal/slicing.cpp).
- Operations that change a few elements (`Scatter::eval_gpu` and others in mlx/backend/metal/indexing.cpp) go on in the
  buffer of their first input if they may have it (`is_donatable` in mlx/array.h), and copy all of it otherwise. Who
  uses a buffer holds it until the command buffer is done (`eval` in mlx/backend/metal/eval.cpp).

Two uses of a buffer, one of which writes, must be ordered. MLX sees to that where it knows of the writes, so what is
looked at are buffers that a kernel writes without having them as outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations

from tests.hazards.graph import Graph, Op
from tests.hazards.order import Ordered

ALIASES = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "View",
}  # fmt: skip
"""Operations whose results lie in the buffer of their (first) input."""

RESHAPES = {"Contiguous", "Flatten", "Reshape", "Unflatten"}
"""Aliases of what is laid out line by line; anything else they copy."""

WRITES = {"DynamicSliceUpdate", "MaskedScatter", "Scatter", "ScatterAxis", "SliceUpdate"}
"""Operations whose result is their first input with other elements here and there."""


@dataclass(frozen=True)
class Fault:
    """`kind`: "read after write", "write after read", "write after write": of these two uses of an array nothing orders
    the second behind the first; "copy": the first copies all of the array instead of writing it in place; "lost write":
    a kernel that was called is never run, since nothing that is evaluated is made of its outputs."""

    kind: str
    array: str
    first: str
    second: str = ""

    def __str__(self) -> str:
        return f"{self.kind} of {self.array}: {self.first}" + (f", then {self.second}" if self.second else "")


@dataclass(frozen=True)
class _Use:
    dispatch: int
    writes: bool
    hidden: bool  # a write that MLX does not know of
    by: str


@dataclass
class _Buffer:
    label: str
    uses: list[_Use] = field(default_factory=list)


def faults(graph: Graph, kept: Iterable[str] = ()) -> list[Fault]:
    """Return what is wrong with a graph on Metal. `kept`: the labels of arrays that nothing may copy."""
    run = _Run(graph, set(kept))
    for step, evaluation in enumerate(graph.evaluations):
        for array in evaluation.arrays:
            for op in run.needed(array):
                run.execute(op, f"{op.name} in evaluation {step}")
        if evaluation.waits and evaluation.arrays:
            run.ordered.wait(run.buffer_of[array] for array in evaluation.arrays if array in run.buffer_of)
        elif evaluation.waits:
            run.ordered.synchronize()
    return run.faults + list(run.lost()) + list(run.unordered())


class _Run:
    """A graph on its way through the back end."""

    def __init__(self, graph: Graph, kept: set[str]):
        self.ordered = Ordered()
        self.faults: list[Fault] = []
        self._ops, self._called = graph.ops, graph.called
        self.buffer_of: dict[str, int] = {}
        self._buffers: list[_Buffer] = []
        self._kept = kept
        self._lines: set[str] = set()  # arrays that are laid out line by line and fill their buffer
        self._maker = {output: op for op in graph.ops for output in op.outputs}
        self._users: dict[str, list[Op]] = {}
        for op in graph.ops:
            for array in op.inputs:
                self._users.setdefault(array, []).append(op)
        self._executed: set[int] = set()
        for op in graph.ops:
            for array in op.inputs:
                if array not in self._maker and array not in self.buffer_of:  # given, or a constant
                    self._new(array, graph.labels.get(array, f"constant {array}"))
        for array, label in graph.labels.items():
            if array not in self.buffer_of:
                self._new(array, label)

    def needed(self, array: str) -> list[Op]:
        """Return what is still to be executed for an array, inputs first."""
        found: list[Op] = []
        seen: set[int] = set()
        stack = [(array, False)]
        while stack:
            name, ready = stack.pop()
            op = self._maker.get(name)
            if op is None or id(op) in self._executed or (id(op) in seen and not ready):
                continue
            if ready:
                found.append(op)
                continue
            seen.add(id(op))
            stack.append((name, True))
            stack += [(each, False) for each in reversed(op.inputs)]
        return found

    def execute(self, op: Op, by: str) -> None:
        self._executed.add(id(op))
        if op.name in ALIASES or (op.name in RESHAPES and op.inputs[0] in self._lines):
            self._alias(op)
        elif op.name in WRITES:
            self._write(op, by)
        else:
            self._dispatch(op, by)

    def _alias(self, op: Op) -> None:
        pairs = zip(op.outputs, op.inputs if op.name == "Depends" else op.inputs[:1] * len(op.outputs), strict=False)
        for output, array in pairs:
            self.buffer_of[output] = self.buffer_of[array]
            if array in self._lines and not op.cuts:
                self._lines.add(output)

    def _write(self, op: Op, by: str) -> None:
        target, *rest = op.inputs
        buffer = self.buffer_of[target]
        others = [self.buffer_of[array] for array in rest]
        if self._is_free(op, target):
            dispatch = self.ordered.dispatch(others, [buffer])
            self._use(buffer, dispatch, by, writes=True)
            self.buffer_of[op.outputs[0]] = buffer
            self._lines.add(op.outputs[0])
        else:
            label = self._buffers[buffer].label
            if label in self._kept:
                self.faults.append(Fault("copy", label, by))
            copy = self._new(op.outputs[0], label)
            self._use(buffer, self.ordered.dispatch([buffer], [copy]), f"the copy by {by}")
            dispatch = self.ordered.dispatch(others, [copy])
        for other in others:
            self._use(other, dispatch, by)

    def _is_free(self, op: Op, target: str) -> bool:
        """Whether nobody holds the buffer of an array but the operation that is to write it."""
        buffer = self.buffer_of[target]
        if target not in self._lines or any(
            not use.writes or use.hidden for use in self._buffers[buffer].uses if not self.ordered.is_done(use.dispatch)
        ):
            return False
        sharing = [array for array, own in self.buffer_of.items() if own == buffer]
        return not any(
            user is not op and id(user) not in self._executed
            for array in sharing
            for user in self._users.get(array, ())
        )

    def _dispatch(self, op: Op, by: str) -> None:
        inputs = [self._given(op, array, by) for array in op.inputs]
        outputs = [self._new(array, f"{array} of {by}") for array in op.outputs]
        dispatch = self.ordered.dispatch(inputs, outputs)
        for array, buffer in zip(op.inputs, inputs, strict=True):
            self._use(buffer, dispatch, by, writes=array in op.writes, hidden=array in op.writes)

    def _given(self, op: Op, array: str, by: str) -> int:
        """Return the buffer that an operation takes for an array: of a copy, where it makes one before."""
        buffer = self.buffer_of[array]
        if op.name != "Concatenate" and array in self._lines:
            return buffer
        if array in op.writes:
            self.faults.append(Fault("copy", self._buffers[buffer].label, by))
        self._buffers.append(_Buffer(f"a copy for {by}"))
        copy = len(self._buffers) - 1
        self._use(buffer, self.ordered.dispatch([buffer], [copy]), by)
        return copy

    def _new(self, array: str, label: str) -> int:
        self._buffers.append(_Buffer(label))
        self.buffer_of[array] = len(self._buffers) - 1
        self._lines.add(array)
        return self.buffer_of[array]

    def _use(self, buffer: int, dispatch: int, by: str, *, writes: bool = False, hidden: bool = False) -> None:
        self._buffers[buffer].uses.append(_Use(dispatch, writes, hidden, by))

    def lost(self) -> Iterator[Fault]:
        """Return which kernels that write were called more often than run."""
        for kernel, calls in self._called.items():
            runs = sum(op.name == kernel for op in self._ops if id(op) in self._executed)
            if runs < calls:
                yield Fault("lost write", f"{calls - runs} of {calls} calls", kernel)

    def unordered(self) -> Iterator[Fault]:
        """Return all pairs of uses that nothing orders, of buffers that kernels write as inputs."""
        for buffer in self._buffers:
            if not any(use.hidden for use in buffer.uses):
                continue
            for first, second in combinations(buffer.uses, 2):
                if not (first.writes or second.writes) or first.dispatch == second.dispatch:
                    continue
                if not self.ordered.comes_after(second.dispatch, first.dispatch):
                    kind = f"{'write' if second.writes else 'read'} after {'write' if first.writes else 'read'}"
                    yield Fault(kind, buffer.label, first.by, second.by)
