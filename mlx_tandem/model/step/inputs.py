"""How the numbers that the host makes for a forward reach the device.

On CUDA an array of the host's lies in memory that both sides share: its page moves to the device when a step first
reads it, and back when the host writes there again, and each of that takes longer than the kernels that read it (20 to
60 µs on an H200). So all of them travel as one array, which is copied on the device once. On a CPU they are where they
are needed, and each further node of a graph takes time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.step.staging import Buffer, Staging

Numbers = npt.NDArray[Any]
"""int32, uint32 or float32. One that cannot be written never changes."""

KEPT = 64
"""Arrays that are on the device and whose numbers may be used again."""

_ALIGNED = 4  # numbers; kernels load so many at once

_TYPES = {"int32": mx.int32, "uint32": mx.uint32, "float32": mx.float32}


class Form(NamedTuple):
    shape: tuple[int, ...]
    type: str


class Sent(NamedTuple):
    """What the forward is given, for `receive` there; `buffer` holds it, if it travels as one."""

    arrays: list[mx.array]
    buffer: Buffer | None = None


class Inputs:
    """The host's end. `packed`: all numbers of a forward travel as one array."""

    def __init__(self, packed: bool | None = None):
        self.packed = "cuda" in dialect.available() if packed is None else packed
        self._kept: dict[int, tuple[Numbers, mx.array]] = {}
        self._staging = Staging()

    def send(self, numbers: Sequence[Numbers]) -> Sent:
        if not self.packed:
            return Sent([self._array(n) for n in numbers])
        spans = [_aligned(n.size) for n in numbers]
        buffer = self._staging.take(sum(spans))
        start = 0
        for n, span in zip(numbers, spans, strict=True):
            buffer.numbers[start : start + n.size] = n.reshape(-1).view(np.int32)
            start += span
        return Sent([buffer.array], buffer)

    def done(self, sent: Sent) -> None:
        """The device has what was sent. Where nobody says so, its buffer is not used again."""
        if sent.buffer is not None:
            self._staging.give_back(sent.buffer)

    def _array(self, numbers: Numbers) -> mx.array:
        if numbers.flags.writeable:
            return mx.array(numbers)
        kept = self._kept.get(id(numbers))
        if kept is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            kept = self._kept[id(numbers)] = numbers, mx.array(numbers)
        return kept[1]


def forms(numbers: Sequence[Numbers]) -> tuple[Form, ...]:
    return tuple(Form(n.shape, n.dtype.name) for n in numbers)


def receive(sent: Sequence[mx.array], expected: Sequence[Form]) -> list[mx.array]:
    """In the forward: the arrays that were sent, which have these forms. Each is contiguous."""
    if len(sent) == len(expected):
        return list(sent)
    (whole,) = sent
    whole = whole + 0  # a copy in the device's own memory
    arrays = []
    start = 0
    for shape, kind in expected:
        size = int(np.prod(shape))
        array = whole[start : start + size].reshape(shape)
        arrays.append(array if kind == "int32" else array.view(_TYPES[kind]))
        start += _aligned(size)
    return arrays


def constant(numbers: Numbers) -> Numbers:
    """The same array, which cannot be written from here on."""
    numbers.flags.writeable = False
    return numbers


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
