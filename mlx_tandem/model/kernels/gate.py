"""Kernel that copies a step's numbers to the device once the host has written them.

A step that waits in this kernel can be dispatched before its numbers are known. The device then begins with it as soon
as the host has them, and not after the milliseconds that MLX needs to dispatch a step.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

_THREADS = 512

_BODY = r"""
  const int count = numbers_shape[0];
  if (THREAD == 0) AWAIT(numbers + count - 1);
  BARRIER();
  for (int i = THREAD; i < count; i += THREADS) copy[i] = LOAD_SHARED(numbers + i);
"""


class Gate:
    """The kernel for CUDA."""

    def __init__(self, make: Make):
        self._kernel = make(Source("gate", ["numbers"], ["copy"], _BODY))

    def __call__(self, numbers: mx.array) -> mx.array:
        """Return a copy of `numbers`, int32 [count], made once the last of them is not 0."""
        (copy,) = self._kernel([numbers], {}, (1, 1, 1), _THREADS, [(numbers.shape, mx.int32)])
        return copy
