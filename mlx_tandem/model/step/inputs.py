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

Numbers = npt.NDArray[Any]
"""int32 or uint32. One that cannot be written never changes."""

KEPT = 64
"""Arrays that are on the device and whose numbers may be used again."""

_ALIGNED = 4  # numbers; kernels load so many at once


class Form(NamedTuple):
    shape: tuple[int, ...]
    unsigned: bool


class Inputs:
    """The host's end. `packed`: all numbers of a forward travel as one array."""

    def __init__(self, packed: bool | None = None):
        self.packed = "cuda" in dialect.available() if packed is None else packed
        self._kept: dict[int, tuple[Numbers, mx.array]] = {}
        self._sent: mx.array | None = (
            None  # held until the next: the device's copy would take its memory over otherwise
        )

    def send(self, numbers: Sequence[Numbers]) -> list[mx.array]:
        """What the forward is given, for `receive` there."""
        if not self.packed:
            return [self._array(n) for n in numbers]
        spans = [_aligned(n.size) for n in numbers]
        whole = np.zeros(sum(spans), np.int32)
        start = 0
        for n, span in zip(numbers, spans, strict=True):
            whole[start : start + n.size] = n.reshape(-1).view(np.int32)
            start += span
        self._sent = mx.array(whole)
        return [self._sent]

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
    return tuple(Form(n.shape, n.dtype == np.uint32) for n in numbers)


def receive(sent: Sequence[mx.array], expected: Sequence[Form]) -> list[mx.array]:
    """In the forward: the arrays that were sent, which have these forms. Each is contiguous."""
    if len(sent) == len(expected):
        return list(sent)
    (whole,) = sent
    whole = whole + 0  # a copy in the device's own memory
    arrays = []
    start = 0
    for shape, unsigned in expected:
        size = int(np.prod(shape))
        array = whole[start : start + size].reshape(shape)
        arrays.append(array.view(mx.uint32) if unsigned else array)
        start += _aligned(size)
    return arrays


def constant(numbers: Numbers) -> Numbers:
    """The same array, which cannot be written from here on."""
    numbers.flags.writeable = False
    return numbers


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
