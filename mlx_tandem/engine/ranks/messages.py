"""The messages between ranks, in msgpack: the orders of the leading rank, and the answers of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine.budget import StepLimits
from mlx_tandem.engine.plan import Row, Seating, StepPlan
from mlx_tandem.types import AdapterInfo, MemoryBudget


class Array(Struct, frozen=True, array_like=True):
    """An array of the host: its type as numpy names it, its shape and its bytes."""

    type: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: npt.NDArray[Any]) -> Array:
        """Return the message for an array."""
        return Array(array.dtype.name, array.shape, np.ascontiguousarray(array).tobytes())

    def read(self) -> npt.NDArray[Any]:
        """Return the array. Raises ValueError if the shape does not fit the bytes."""
        return np.frombuffer(self.data, TYPES[self.type]).reshape(self.shape)


TYPES = {name: np.dtype(name) for name in ("int32", "uint32", "float32")}
"""The types of arrays that are sent."""


class Begin(Struct, frozen=True, tag=True):
    """The first message to a rank: the settings with which it loads its share of the model."""

    config: EngineConfig


class Decided(Struct, frozen=True, tag=True):
    """The choices of the leading rank for all ranks, once it has its share of the weights.

    `choices` are JSON, as the drive has them, `budget` divides every rank's memory, `limits` bound a step, and
    `weights` is the digest of the first rank's weights (`ranks/weights.py`).
    """

    choices: bytes
    budget: MemoryBudget
    limits: StepLimits
    weights: str


class Join(Struct, frozen=True, tag=True):
    """Connect with the other ranks, check sums of `shapes` (rows, width), and then compute all steps with them."""

    shapes: tuple[tuple[int, int], ...]


class Launch(Struct, frozen=True, tag=True):
    """Launch a step: the fields of its StepPlan that a step of several ranks may have."""

    rows: tuple[Row, ...]
    uploads: tuple[tuple[int, str], ...]
    copies: tuple[tuple[int, int], ...]
    seatings: tuple[Seating, ...]
    saves: tuple[int, ...]
    loads: tuple[tuple[int, bytes], ...]
    masked: tuple[int, ...]

    @staticmethod
    def of(plan: StepPlan) -> Launch:
        """Return the message for a plan, whose `loads` are those of the rank that gets it."""
        loads: Any = plan.loads
        return Launch(plan.rows, plan.uploads, plan.copies, plan.seatings, plan.saves, loads, plan.masked)

    def plan(self) -> StepPlan:
        """Return the plan."""
        return StepPlan(self.rows, self.uploads, self.copies, self.seatings, self.saves, self.loads, self.masked)


class Sample(Struct, frozen=True, tag=True):
    """Let the masked rows of a step draw by these numbers, which the leading rank's `place` has returned.

    `launch` is the number of the step's `Launch`, counted from 0.
    """

    launch: int
    numbers: tuple[tuple[Array, ...], ...]


class Wait(Struct, frozen=True, tag=True):
    """Wait for the step of `Launch` number `launch`, counted from 0, and answer with `Done`."""

    launch: int


class Reset(Struct, frozen=True, tag=True):
    """Drop everything in flight and all contents of the pool."""


class OneAtATime(Struct, frozen=True, tag=True):
    """Whether a step begins only when the step before it is done."""

    value: bool


class AdapterPart(Struct, frozen=True, tag=True):
    """A piece of an adapter: the bytes of its arrays, one after the other. The first piece has `adapter`."""

    digest: str
    data: bytes
    adapter: AdapterShapes | None = None


class AdapterShapes(Struct, frozen=True):
    """An adapter without its numbers: float32 arrays A and B by the path of the linear."""

    info: AdapterInfo
    shapes: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]

    @staticmethod
    def of(weights: AdapterWeights) -> AdapterShapes:
        """Return the shapes of an adapter."""
        return AdapterShapes(weights.info, tuple((p, a.shape, b.shape) for p, (a, b) in weights.tensors.items()))

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(4 * (_size(a) + _size(b)) for _, a, b in self.shapes)

    def filled(self, data: bytearray) -> AdapterWeights:
        """Return the adapter with these bytes."""
        numbers, start = np.frombuffer(data, np.float32), 0
        tensors = {}
        for path, a, b in self.shapes:
            middle = start + _size(a)
            end = middle + _size(b)
            tensors[path] = numbers[start:middle].reshape(a), numbers[middle:end].reshape(b)
            start = end
        return AdapterWeights(self.info, tensors)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


class DropAdapter(Struct, frozen=True, tag=True):
    """Forget an adapter, which no later step installs."""

    digest: str


Order = Begin | Decided | Join | Launch | Sample | Wait | Reset | OneAtATime | AdapterPart | DropAdapter
"""A message from the leading rank to another."""


class Hello(Struct, frozen=True, tag=True):
    """The first message of a rank that the leading rank has not started itself."""

    rank: int


class Alive(Struct, frozen=True, tag=True):
    """A sign of life, sent every second."""


class Loaded(Struct, frozen=True, tag=True):
    """The answer to `Decided`: the rank has its share of the weights, its pool, and the bytes that it uses."""

    memory: int


class Joined(Struct, frozen=True, tag=True):
    """The answer to `Join`. `problem` says which sum is wrong; empty: none."""

    problem: str


class Done(Struct, frozen=True, tag=True):
    """The answer to `Wait`: a digest of the tokens that this rank has drawn in the step, and its part of each block
    that the step has saved.
    """

    tokens: bytes
    saves: tuple[bytes, ...] = ()


class Failed(Struct, frozen=True, tag=True):
    """The last message of a rank that cannot go on. `code` and `param` are those of a refused model, if it is one."""

    message: str
    code: str = ""
    param: str | None = None


Answer = Hello | Alive | Loaded | Joined | Done | Failed
"""A message from another rank to the leading one."""
