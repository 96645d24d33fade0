"""Memory that host and device share, filled by the one and read by the other, again and again.

On CUDA an array of the host's lies in such memory. MLX takes any freed buffer of about the size for a new one; a buffer
of the device's own is moved there first, and the host waits for the copy of what nobody will read, behind whatever the
device is at (0.1 to 5 ms on an H200). Learning frees many of the sizes that steps ask for.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_LEAST = 256  # numbers


class Buffer(NamedTuple):
    """int32 [size], a power of two: the same memory as the host writes it and as the device reads it."""

    numbers: npt.NDArray[np.int32]
    array: mx.array


class Staging:
    """Buffers that nobody uses now."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)

    def take(self, size: int) -> Buffer:
        """One of `size` numbers or more, whatever they are."""
        size = max(1 << (size - 1).bit_length(), _LEAST)
        if self._free[size]:
            return self._free[size].pop()
        array = mx.array(np.zeros(size, np.int32))
        numbers: npt.NDArray[Any] = np.asarray(array)
        return Buffer(numbers, array)

    def give_back(self, buffer: Buffer) -> None:
        """The device has read what was in it."""
        self._free[buffer.array.size].append(buffer)
