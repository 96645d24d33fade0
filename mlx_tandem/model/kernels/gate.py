"""Kernel that copies a step's numbers to the device once the host has written them.

A step that waits in this kernel can be dispatched before its numbers are known. The device then begins with it as soon
as the host has them, and not after the milliseconds that MLX needs to dispatch a step.
"""

from __future__ import annotations

import platform

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

_THREADS = 512

OPEN, TOLD = -1, -2
"""The indices, in the numbers, of the one that the kernel waits for and of the one that it writes."""

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether the device sees what the host writes in the order in which the host writes it."""

RESERVED = 2
"""How many of the last numbers these are."""

IN_TIME, TOO_LATE = 1, 2
"""What the kernel writes: whether the host had opened the gate when it read the numbers."""

_BODY = r"""
  const int count = numbers_shape[0];
  if (THREAD == 0) {
    const bool opened = AWAIT(numbers + count - 1);
    STORE_SHARED(numbers + count - 2, opened ? 1 : 2);
  }
  BARRIER();
  for (int i = THREAD; i < count; i += THREADS) copy[i] = LOAD_SHARED(numbers + i);
"""


class Gate:
    """The kernel for CUDA."""

    def __init__(self, make: Make):
        self._kernel = make(Source("gate", ["numbers"], ["copy"], _BODY, writes=["numbers"]))

    def __call__(self, numbers: mx.array) -> mx.array:
        """Return a copy of `numbers`, int32 [count], made once the last of them is not 0, or after ten seconds.

        The last but one says then which of both it was.
        """
        (copy,) = self._kernel([numbers], {}, (1, 1, 1), _THREADS, [(numbers.shape, mx.int32)])
        return copy
