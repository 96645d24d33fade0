"""Kernel that writes lines of an array in place while other lines of it are read."""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

_THREADS = 256

_BODY = r"""
  const int width = lines_shape[1];
  const size_t i = (size_t)GROUP_X * THREADS + THREAD, count = (size_t)lines_shape[0] * width;
  if (i < count) ((GLOBAL T*)array)[(size_t)rows[i / width] * width + i % width] = lines[i];
  if (i == 0) done[0] = 0;
"""


class Store:
    """The kernel for one target."""

    def __init__(self, make: Make):
        self._kernel = make(Source("store", ["array", "rows", "lines"], ["done"], _BODY, writes=["array"]))

    def __call__(self, array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
        """Set array[rows] = lines, and return a zero, int32 [1], on which everything that reads the lines must
        depend.
        """
        groups = -(-lines.size // _THREADS)
        (done,) = self._kernel([array, rows, lines], {"T": array.dtype}, (groups, 1, 1), _THREADS, [((1,), mx.int32)])
        return done
