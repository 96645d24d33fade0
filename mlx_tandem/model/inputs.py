"""The transfer of a forward's numbers from the host to the device, and of drawn tokens back.

On CUDA an array made by the host lies in memory that both sides share. Its page moves to the device when a step first
reads it, and back when the host writes there again; each move takes longer than the kernels that read it (20 to 60 µs
on an H200). So all numbers of a forward travel as one array, which stays with the host (`Staging`) and is copied
once to the device's own memory. On a CPU the numbers are where they are needed, and each further node of a graph would
only take time.

A step on CUDA writes the tokens that it has drawn into the same array, where the host reads them without a copy. The
last places of the array belong to the kernel at which a step may wait for its numbers (`kernels/exchange.py`).
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.model import backend
from mlx_tandem.model.kernels.exchange import OPEN, RESERVED, TOLD, TOO_LATE

Numbers = npt.NDArray[Any]
"""Arrays of int32, uint32 or float32. An array that cannot be written never changes."""

KEPT = 64
"""Most constant arrays that are kept on the device to be used again."""

_ALIGNED = 4  # numbers that a kernel loads at once

_TYPES = {"int32": mx.int32, "uint32": mx.uint32, "float32": mx.float32}


class ArraySpec(NamedTuple):
    """The shape and the type of an array that is sent."""

    shape: tuple[int, ...]
    type: str


class Sent(NamedTuple):
    """The arrays that the forward is given, for `receive` there.

    Attributes:
        arrays: The arrays.
        buffer: The buffer that holds the numbers if they travel as one array.
        room: How many numbers the device writes back into that buffer.
    """

    arrays: list[mx.array]
    buffer: Buffer | None = None
    room: int = 0

    @property
    def written_back(self) -> list[int]:
        """The numbers that the device has written back. It has to be done with the step."""
        assert self.buffer is not None
        numbers: list[int] = self.buffer.numbers[-RESERVED - self.room : -RESERVED].tolist()
        return numbers


class Inputs:
    """The host's end of the transfer. `packed`: whether all numbers of a forward travel as one array; None: as
    the device needs it.
    """

    def __init__(self, packed: bool | None = None):
        self.packed = backend.current().steps.numbers_as_one if packed is None else packed
        self._kept: dict[int, tuple[Numbers, mx.array]] = {}
        self._staging = Staging()

    def send(self, numbers: Sequence[Numbers], room: int = 0) -> Sent:
        """Return the arrays for a forward with these numbers. `room` is as in `Sent` if they travel as one array."""
        if not self.packed:
            return Sent([self._array(n) for n in numbers])
        sent = self.reserve(numbers, room)
        self.fill(sent, numbers)
        return sent

    def reserve(self, numbers: Sequence[Numbers], room: int = 0) -> Sent:
        """Return the array for a forward with numbers of these shapes and types, which `fill` is to write.

        All numbers have to travel as one array. room: as in `Sent`.
        """
        buffer = self._staging.take(sum([_aligned(n.size) for n in numbers]) + room + RESERVED)
        buffer.numbers[OPEN] = buffer.numbers[TOLD] = 0
        return Sent([buffer.array], buffer, room)

    def fill(self, sent: Sent, numbers: Sequence[Numbers]) -> None:
        """Write the numbers into an array that `reserve` has returned, and let a step that waits for them go on."""
        self.write(sent, numbers)
        self.open(sent)

    def write(self, sent: Sent, numbers: Sequence[Numbers]) -> None:
        """Write the numbers into an array that `reserve` has returned. A step that waits for them goes on waiting."""
        assert sent.buffer is not None
        start = 0
        for n in numbers:
            sent.buffer.numbers[start : start + n.size] = n.reshape(-1).view(np.int32)
            start += _aligned(n.size)

    def open(self, sent: Sent) -> None:
        """Let a step that waits for its numbers go on with what is written."""
        assert sent.buffer is not None
        sent.buffer.numbers[OPEN] = 1

    def came_in_time(self, sent: Sent) -> bool:
        """Return whether the device read what was sent only after the host had opened it. The device must be done."""
        return sent.buffer is None or sent.buffer.numbers[TOLD] != TOO_LATE

    def done(self, sent: Sent) -> None:
        """Note that neither the device nor the host reads what was sent any more: its buffer can be used again."""
        if sent.buffer is not None:
            self._staging.give_back(sent.buffer)

    def _array(self, numbers: Numbers) -> mx.array:
        """Return the numbers as an array; that of a constant is made once."""
        if numbers.flags.writeable:
            return mx.array(numbers)
        kept = self._kept.get(id(numbers))
        if kept is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            kept = self._kept[id(numbers)] = numbers, mx.array(numbers)
        return kept[1]


def specs(numbers: Sequence[Numbers]) -> tuple[ArraySpec, ...]:
    """Return shape and type of each array."""
    return tuple(ArraySpec(n.shape, n.dtype.name) for n in numbers)


Copy = Callable[[mx.array], mx.array]
"""A function that copies an array of numbers into the device's own memory."""


def copied(numbers: mx.array) -> mx.array:
    """Return a copy of the numbers."""
    return numbers + 0


def receive(sent: Sequence[mx.array], expected: Sequence[ArraySpec], copy: Copy = copied) -> list[mx.array]:
    """Return the arrays that were sent, in the forward that is being traced. Each is contiguous.

    expected: their shapes and types; copy: copies them to the device if they travel as one array.
    """
    if [(a.shape, a.dtype) for a in sent] == [(s.shape, _TYPES[s.type]) for s in expected]:
        return list(sent)
    (whole,) = sent
    whole = copy(whole)
    arrays = []
    start = 0
    for shape, kind in expected:
        size = int(np.prod(shape))
        array = whole[start : start + size].reshape(shape)
        arrays.append(array if kind == "int32" else array.view(_TYPES[kind]))
        start += _aligned(size)
    return arrays


@lru_cache(maxsize=1024)
def arange(n: int, step: int = 1) -> mx.array:
    """Return the first n multiples of `step`, int32, evaluated; made once, and a constant of every graph that uses it.

    Multiplying inside of a graph would make the step a constant of a fused operation, which a GPU then compiles for
    each step.
    """
    return mx.array(np.arange(n, dtype=np.int32) * step)


def constant(numbers: Numbers) -> Numbers:
    """Make an array read-only and return it."""
    numbers.flags.writeable = False
    return numbers


def padded(ids: Sequence[Sequence[int]], count: int, length: int) -> Numbers:
    """Return [count, length] int32 with these ids, padded with 0."""
    numbers = np.zeros((count, length), np.int32)
    for i, own in enumerate(ids):
        numbers[i, : len(own)] = own
    return numbers


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


# --- Buffers ---------------------------------------------------------------------------------------------------------

_LEAST = 256  # numbers of the smallest buffer


class Buffer(NamedTuple):
    """A piece of memory as the host writes it and as the device reads it: int32 [size], size being a power of two."""

    numbers: npt.NDArray[np.int32]
    array: mx.array


class Staging:
    """Buffers in memory that host and device share and use again and again; those that are not in use.

    On CUDA an array made by the host lies in such memory. MLX reuses any freed buffer of about the right size for a new
    array. If that buffer was the device's, its content is moved first, and the host waits for this useless copy until
    the device has finished its present work (0.1 to 5 ms on an H200). Learning frees many buffers of the sizes that
    steps need.

    The pages of such memory move to the side that touches them, and a step waits for this move (0.15 ms on an H200). So
    the driver is told to leave these buffers with the host, and the device reads them from there.
    """

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
