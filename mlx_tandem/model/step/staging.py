"""Buffers in memory that host and device share, which the host fills and the device reads again and again.

On CUDA an array made by the host lies in such memory. MLX reuses any freed buffer of about the right size for a new
array. If that buffer was the device's, its content is moved first, and the host waits for this useless copy until the
device has finished its present work (0.1 to 5 ms on an H200). Learning frees many buffers of the sizes that steps need.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

_LEAST = 256  # numbers of the smallest buffer


class Buffer(NamedTuple):
    """A piece of memory as the host writes it and as the device reads it: int32 [size], size being a power of two."""

    numbers: npt.NDArray[np.int32]
    array: mx.array


class Staging:
    """The buffers that are not in use."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Buffer]] = defaultdict(list)

    def take(self, size: int) -> Buffer:
        """Return a buffer of `size` numbers or more, with any content."""
        size = max(1 << (size - 1).bit_length(), _LEAST)
        if self._free[size]:
            return self._free[size].pop()
        array = mx.array(np.zeros(size, np.int32))
        numbers: npt.NDArray[Any] = np.asarray(array)
        return Buffer(numbers, array)

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer whose content the device has read."""
        self._free[buffer.array.size].append(buffer)
