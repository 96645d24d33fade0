"""Kernel that copies a step's numbers to the device once the host has written them.

A step that begins with this kernel can be dispatched before its numbers are known, and waits there. As soon as the host
has written the numbers, the device goes on; without the gate it would wait for the milliseconds that MLX needs to
dispatch a step.
"""

from __future__ import annotations

import platform

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

_THREADS = 512

OPEN, TOLD = -1, -2
"""Indices of two places among the numbers. The kernel waits until the first is not 0, and writes into the second
whether the host had opened the gate in time."""

IN_ORDER = platform.machine() in ("x86_64", "AMD64")
"""Whether the device sees what the host writes in the order in which the host writes it."""

RESERVED = 2
"""Number of places at the end of the numbers that the kernel needs for this."""

IN_TIME, TOO_LATE = 1, 2
"""The two values that the kernel writes: it read the numbers after the host had opened the gate, or without that."""

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
        """Return a copy of `numbers`, int32 [count].

        The kernel copies them as soon as the last of them is not 0, or after a second. It writes into the last but
        one of `numbers` which of the two it was.
        """
        (copy,) = self._kernel([numbers], {}, (1, 1, 1), _THREADS, [(numbers.shape, mx.int32)])
        return copy
