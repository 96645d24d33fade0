"""How MLX's Metal back end cuts a graph into command buffers, and what they keep in memory until they are done.

The rules are those of MLX 0.32.4; the files are of its folder mlx/.

- `eval_impl` in transforms.cpp orders the operations: breadth first from the results, at most 20 wide, then backwards.
- An operation that only gives a buffer another shape dispatches nothing (see `rule.py`). A concatenation dispatches a
  copy for each input.
- A command buffer ends behind more than MLX_MAX_OPS_PER_BUFFER dispatches (`needs_commit` in backend/metal/device.cpp),
  and with every evaluation. The host waits when more than ten of the first kind are under way.
- A command buffer holds the inputs of its operations until it is done (`eval` in backend/metal/eval.cpp).

Here nothing is done before the host waits for it, which is the worst case, and no operation takes the buffer of its
input for its output, which MLX does where it can.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mlx_tandem.model.device import COMMAND_BUFFER_OPERATIONS
from tests.hazards.graph import Graph, Op
from tests.hazards.rule import ALIASES, RESHAPES

ACTIVE = 10
"""`MAX_ACTIVE_TASKS` in transforms.cpp."""

WIDTH = 20
"""`bfs_max_width` in utils.h."""


@dataclass(eq=False)
class CommandBuffer:
    """Operations that the device gets at once. `held`: the arrays' buffers that it holds until it is done; `counts`:
    whether the host counts it among those under way."""

    ops: list[Op] = field(default_factory=list)
    dispatches: int = 0
    held: set[int] = field(default_factory=set)
    counts: bool = False


class Run:
    """A graph on its way through the back end.

    Attributes:
        peak: Most bytes that were alive at once, besides arrays that were there before and weights, which a model
            without files makes of random numbers.
        committed: All command buffers in their order.
    """

    def __init__(self, graph: Graph):
        self.peak = 0
        self.committed: list[CommandBuffer] = []
        self.graph = graph
        self._maker = {output: op for op in graph.ops for output in op.outputs}
        self._executed = _weights(graph)
        self._reads = Counter(array for op in graph.ops if id(op) not in self._executed for array in op.inputs)
        self._reads.update(array for evaluation in graph.evaluations for array in evaluation.arrays)
        self._buffer_of: dict[str, int] = {}
        self._sizes: list[int] = []  # of each buffer
        self._needed: Counter[int] = Counter()  # by buffer: reads to come, and command buffers that hold it
        self._alive = 0
        self._open = CommandBuffer()
        self._under_way: deque[CommandBuffer] = deque()
        behind: dict[str, CommandBuffer] = {}  # the last command buffer of the first evaluation of an array
        for evaluation in graph.evaluations:
            for op in self._tape(evaluation.arrays):
                self._execute(op)
            self._commit(counts=False)
            for array in evaluation.arrays:
                last = behind.setdefault(self._source(array), self.committed[-1])
                if evaluation.waits:
                    self._finish(last)
                self._release(self._buffer_of.get(array))

    def _source(self, array: str) -> str:
        """Return the array that was evaluated, which `graph.record` has wrapped."""
        while (op := self._maker.get(array)) is not None and op.name == "StopGradient":
            (array,) = op.inputs
        return array

    def _tape(self, results: Iterable[str]) -> list[Op]:
        """Return what is still to be executed for these arrays, in the order of `eval_impl`."""
        wanted = self._makers(results)
        degree = Counter(id(op) for op in wanted)
        todo = list({id(op): op for op in wanted}.values())
        while todo:
            for op in self._makers(todo.pop().inputs):
                degree[id(op)] += 1
                if degree[id(op)] == 1:
                    todo.append(op)
        nodes, tape = [wanted], list[Op]()  # of each node its inputs; the first stands for all results
        rest: list[tuple[list[Op], int]] = []
        at = 0
        while at < len(nodes) or rest:
            if at < len(nodes):
                inputs, first = nodes[at], 0
                at += 1
            else:
                inputs, first = rest.pop()
            for i, op in enumerate(inputs[first:], first):
                if len(nodes) - at >= WIDTH:
                    rest.append((inputs, i))
                    break
                degree[id(op)] -= 1
                if not degree[id(op)]:
                    nodes.append(self._makers(op.inputs))
                    tape.append(op)
        return tape[::-1]

    def _makers(self, arrays: Iterable[str]) -> list[Op]:
        """Return what makes these arrays and is still to be executed."""
        ops = (self._maker.get(array) for array in arrays)
        return [op for op in ops if op is not None and id(op) not in self._executed]

    def _execute(self, op: Op) -> None:
        self._executed.add(id(op))
        self._open.ops.append(op)
        if op.name in ALIASES or op.name in RESHAPES:
            for i, output in enumerate(op.outputs):
                self._put(output, self._buffer_of.get(op.inputs[i if op.name == "Depends" else 0]))
        else:
            self._open.dispatches += len(op.inputs) if op.name == "Concatenate" else 1
            for output in op.outputs:
                self._sizes.append(self.graph.nbytes(output))
                self._put(output, len(self._sizes) - 1)
        read = [self._buffer_of[array] for array in op.inputs if array in self._buffer_of]
        for buffer in set(read) - self._open.held:
            self._open.held.add(buffer)
            self._needed[buffer] += 1
        for buffer in read:
            self._release(buffer)
        if self._open.dispatches > int(COMMAND_BUFFER_OPERATIONS):
            self._commit(counts=True)
        while sum(each.counts for each in self._under_way) > ACTIVE:
            self._finish(self._under_way[0])

    def _put(self, array: str, buffer: int | None) -> None:
        """Let an array lie in a buffer; None: in one that is not counted."""
        if buffer is None:
            return
        if buffer not in self._needed:
            self._alive += self._sizes[buffer]
            self.peak = max(self.peak, self._alive)
        self._buffer_of[array] = buffer
        self._needed[buffer] += self._reads[array] + 1
        self._release(buffer)  # what nothing reads is freed at once

    def _release(self, buffer: int | None) -> None:
        """Note that somebody needs a buffer no longer, and free it if nobody does."""
        if buffer is None:
            return
        self._needed[buffer] -= 1
        if not self._needed[buffer]:
            del self._needed[buffer]
            self._alive -= self._sizes[buffer]

    def _commit(self, *, counts: bool) -> None:
        self._open.counts = counts
        self.committed.append(self._open)
        self._under_way.append(self._open)
        self._open = CommandBuffer()

    def _finish(self, last: CommandBuffer) -> None:
        """Wait until a command buffer and all before it are done."""
        while last in self._under_way:
            for buffer in self._under_way.popleft().held:
                self._release(buffer)


def _weights(graph: Graph) -> set[int]:
    """Return the operations that make weights: those of random numbers alone."""
    given, random = set(graph.labels), set[str]()
    found = set[int]()
    for op in graph.ops:
        if not given.isdisjoint(op.inputs):
            given.update(op.outputs)
        elif op.name == "RandomBits" or not random.isdisjoint(op.inputs):
            random.update(op.outputs)
            found.add(id(op))
    return found
