"""Buffers in memory that host and device share, which are used again and again.

The host fills them, the device reads them, and some kernels write drawn tokens back into them.

On CUDA an array made by the host lies in such memory. MLX reuses any freed buffer of about the right size for a new
array. If that buffer was the device's, its content is moved first, and the host waits for this useless copy until the
device has finished its present work (0.1 to 5 ms on an H200). Learning frees many buffers of the sizes that steps need.

The pages of such memory move to the side that touches them, and a step waits for this move (0.15 ms on an H200). So the
driver is told to leave these buffers with the host, and the device reads them from there.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from functools import cache
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
        _leave_with_host(numbers)
        return Buffer(numbers, array)

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer that neither side reads any more."""
        self._free[buffer.array.size].append(buffer)


_PREFERRED_LOCATION, _ACCESSED_BY = 3, 5
"""Values of the driver's `CUmem_advise`."""

_HOST, _FIRST_DEVICE = -1, 0
"""The driver's numbers of the host and of the device that MLX uses."""


def _leave_with_host(numbers: npt.NDArray[np.int32]) -> None:
    """Ask CUDA's driver to keep this memory with the host and to let the device read it there.

    Nothing happens without the driver, or if the memory is of another kind: the pages move then.
    """
    driver = _driver()
    if driver is not None:
        for advice, place in ((_PREFERRED_LOCATION, _HOST), (_ACCESSED_BY, _FIRST_DEVICE)):
            driver.cuMemAdvise(ctypes.c_void_p(numbers.ctypes.data), ctypes.c_size_t(numbers.nbytes), advice, place)


@cache
def _driver() -> Any:
    """Return CUDA's driver library; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
