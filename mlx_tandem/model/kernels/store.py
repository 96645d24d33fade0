"""Kernel that writes lines of an array in place while other lines of it are read.

A team of neighbouring threads writes a line, each of them 16 bytes. A team is as wide as a line needs, from one thread
to a whole block, so that a block writes many lines of a few bytes or a part of a line of megabytes. The line and the
place in it come from the grid: 64-bit divisions take long on Apple's GPUs.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Make, Source

_THREADS = 256

_RUN_BYTES = 16

_FUNCTIONS = r"""
template <typename T, int n>
struct alignas(n * sizeof(T)) Run {
  T at[n];
};
"""

# RUN is the number of elements that a thread writes. A run is read one element at a time, because `lines` may begin
# anywhere in its memory, while each line of the array begins at a multiple of a run.
_BODY = r"""
  const int width = lines_shape[1], runs = width / RUN;
  int shift = 0;
  while ((1 << shift) < min(runs, THREADS)) shift++;
  const int line = GROUP_X * (THREADS >> shift) + (THREAD >> shift);
  const int run = (GROUP_Y << shift) + (THREAD & ((1 << shift) - 1));
  if (line < lines_shape[0] && run < runs) {
    const size_t from = (size_t)line * width + run * RUN;
    Run<T, RUN> all;
    UNROLL
    for (int i = 0; i < RUN; i++) all.at[i] = lines[from + i];
    *(GLOBAL Run<T, RUN>*)((GLOBAL T*)array + (size_t)rows[line] * width + run * RUN) = all;
  }
  if (GROUP_X == 0 && GROUP_Y == 0 && THREAD == 0) done[0] = 0;
"""


class Store:
    """The kernel for one target."""

    def __init__(self, make: Make):
        self._kernel = make(Source("store", ["array", "rows", "lines"], ["done"], _BODY, _FUNCTIONS, writes=["array"]))

    def __call__(self, array: mx.array, rows: mx.array, lines: mx.array) -> mx.array:
        """Set array[rows] = lines, and return a zero, int32 [1], on which everything that reads the lines must
        depend.

        array: [n, width]; rows: int32 [m]; lines: [m, width]. Of lines for the same row, any may be written.
        """
        (count, width), whole = lines.shape, _RUN_BYTES // array.dtype.size
        run = whole if width % whole == 0 else 1
        runs = width // run
        team = min(1 << (runs - 1).bit_length(), _THREADS)
        groups = (-(-count * team // _THREADS), -(-runs // team), 1)
        template: dict[str, Constant] = {"T": array.dtype, "RUN": run}
        (done,) = self._kernel([array, rows, lines], template, groups, _THREADS, [((1,), mx.int32)])
        return done
