"""Kernel for the product of few rows by a linear's weights, which reads the weights once at the speed of memory.

A block of threads has 16 · TILES outputs and all inputs: blocks are few, for most layers so few that all run at
once. A block goes through the inputs in slices: while its warps multiply one slice, the next STAGES - 1 are on their
way from device memory to the block's own, which keeps enough bytes in flight to use the memory's whole bandwidth.
Each warp has 32 inputs of a slice; the warps' sums are added up at the end in a fixed order. So within one form the
sum of a row does not depend on how many other rows there are. A lane loads eight neighbours of a row, which are
inputs of two matrix products; `x` has the same order of inputs, so the order does not matter.

The kernel is for CUDA only: its body uses `mma` and `ASYNC16`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source


class Form(NamedTuple):
    """A way to cut the work into blocks, warps and slices."""

    tiles: int
    """A block has 16 · tiles outputs."""

    warps: int
    """Warps of a block, an even number; each has 32 inputs of a slice."""

    stages: int
    """Slices in the block's memory at once, two or more."""

    def room(self, eighths: int) -> int:
        """Return the bytes of a block's own memory that it needs for this many eighths: for slices, and then for
        sums.
        """
        outputs, tokens = 16 * self.tiles, 8 * eighths
        slices = self.stages * (outputs + tokens) * 32 * self.warps * 2
        return max(slices, self.warps * tokens * (outputs + 4) * 4)


def forms(eighths: int) -> tuple[Form, ...]:
    """Return the forms that are worth timing: on an H200 the first is good for any linear, the others for wide ones."""
    return {
        1: (Form(2, 8, 4),),
        2: (Form(2, 8, 4), Form(4, 4, 3)),
        4: (Form(2, 8, 4), Form(3, 8, 4), Form(4, 4, 3)),
        5: (Form(2, 8, 4), Form(4, 8, 3)),
        8: (Form(3, 8, 3),),
    }.get(eighths, ())


EIGHTHS = (1, 2, 4, 5, 8, 10)
"""Numbers of tokens, divided by eight, for which there are kernels, here or in `wgmma.py`. 40 and 80 tokens are those
of eight and sixteen rows with four drafts each."""


def eighths(tokens: int) -> int:
    """Return the entry of EIGHTHS for this number of tokens; 0 if they are too many."""
    return next((n for n in EIGHTHS if 8 * n >= tokens), 0)


class Skinny:
    """The kernel for one target, for 16-bit types only."""

    def __init__(self, make: Make):
        self._kernel = cache(lambda biased, room: _kernel(make, biased, room))

    def __call__(self, x: mx.array, weight: mx.array, bias: mx.array | None, form: Form) -> mx.array:
        """Return x @ weight.T + bias for x [..., inputs], weight [outputs, inputs] and bias [outputs].

        The arrays are contiguous and of one type; x has no more tokens than 8 · EIGHTHS[-1].
        """
        outputs, inputs = weight.shape
        flat = x.reshape(-1, inputs)
        many = eighths(len(flat))
        template: dict[str, Constant] = {"T": x.dtype, "EIGHTS": many}
        template |= {"TILES": form.tiles, "WARPS": form.warps, "STAGES": form.stages}
        (y,) = self._kernel(bias is not None, form.room(many))(
            [flat, weight] if bias is None else [flat, weight, bias],
            template,
            (-(-outputs // (16 * form.tiles)), 1, 1),
            32 * form.warps,
            [((*x.shape[:-1], outputs), x.dtype)],
        )
        return y


def fits(weight: mx.array, bias: mx.array | None) -> bool:
    """Return whether the kernel can compute a linear with this weight and bias.

    It loads rows 16 bytes at a time, and all arrays must be of one type.
    """
    alike = bias is None or bias.dtype == weight.dtype
    return weight.dtype in (mx.bfloat16, mx.float16) and weight.shape[1] % 8 == 0 and alike


def _kernel(make: Make, biased: bool, room: int) -> Kernel:
    name, inputs, bias = ("skinny_biased", ["bias"], "float(bias[n])") if biased else ("skinny", [], "0.0f")
    body = f"#define BIAS(n) {bias}\n" + _BODY
    return make(Source(name, ["x", "weight", *inputs], ["y"], body, _FUNCTIONS, room=room))


_FUNCTIONS = """
// Ask for `LINES` lines of 8 * WIDTH inputs from k on. Of those behind `last`, and of inputs from K on, nothing counts.
// In the block's memory every second line has its halves of 128 bytes swapped, for lanes that read two lines at once.
template <typename T, int LINES, int WIDTH, int THREADS_>
DEVICE void ask(uint4* to, const GLOBAL T* from, int last, int k, int K, int thread) {
  UNROLL for (int i = 0; i < LINES * WIDTH; i += THREADS_) {
    const int each = i + thread, line = each / WIDTH, column = each % WIDTH;
    if (each < LINES * WIDTH) {
      const bool there = k + 8 * column < K;
      const GLOBAL T* at = from + (size_t)min(line, last) * K + (there ? k + 8 * column : 0);
      ASYNC16(to + line * WIDTH + (column ^ ((line & 1) << 2)), at, there);
    }
  }
}
"""

# GROUP_X is the slice of the outputs.
_BODY = """
  constexpr int OUTPUTS = 16 * TILES, TOKENS = 8 * EIGHTS, WIDTH = 4 * WARPS, SLICE = (OUTPUTS + TOKENS) * WIDTH;
  constexpr int ALL = 32 * WARPS, LINE = OUTPUTS + 4;
  ROOM(uint4, room);
  const int K = weight_shape[1], N = weight_shape[0], M = x_shape[0];
  const int g = LANE / 4, t = LANE % 4, first = GROUP_X * OUTPUTS, slices = (K + 8 * WIDTH - 1) / (8 * WIDTH);
  const GLOBAL T* own = weight + (size_t)first * K;
  float4 sums[TILES][EIGHTS];
  UNROLL for (int i = 0; i < TILES; i++) {
    UNROLL for (int e = 0; e < EIGHTS; e++) sums[i][e] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  UNROLL for (int s = 0; s < STAGES - 1; s++) {
    if (s < slices) {
      ask<T, OUTPUTS, WIDTH, ALL>(room + s * SLICE, own, N - 1 - first, s * 8 * WIDTH, K, THREAD);
      ask<T, TOKENS, WIDTH, ALL>(room + s * SLICE + OUTPUTS * WIDTH, x, M - 1, s * 8 * WIDTH, K, THREAD);
    }
    ASYNC_CLOSE();
  }
  const int column = (4 * WARP + t) ^ ((g & 1) << 2);
  int stage = 0;
  for (int s = 0; s < slices; s++) {
    ASYNC_WAIT(STAGES - 2);
    BARRIER();  // this slice is there for all of them, and all of them have done with the one before it
    const int next = s + STAGES - 1, free = stage == 0 ? STAGES - 1 : stage - 1;
    if (next < slices) {
      ask<T, OUTPUTS, WIDTH, ALL>(room + free * SLICE, own, N - 1 - first, next * 8 * WIDTH, K, THREAD);
      ask<T, TOKENS, WIDTH, ALL>(room + free * SLICE + OUTPUTS * WIDTH, x, M - 1, next * 8 * WIDTH, K, THREAD);
    }
    ASYNC_CLOSE();
    const uint4* ws = room + stage * SLICE + g * WIDTH + column;
    const uint4* xs = ws + OUTPUTS * WIDTH;
    uint4 b[EIGHTS];
    UNROLL for (int e = 0; e < EIGHTS; e++) b[e] = xs[8 * e * WIDTH];
    UNROLL for (int i = 0; i < TILES; i++) {
      const uint4 low = ws[16 * i * WIDTH], high = ws[(16 * i + 8) * WIDTH];
      UNROLL for (int e = 0; e < EIGHTS; e++) {
        mma(sums[i][e], WORDS4(low.x, high.x, low.y, high.y), WORDS2(b[e].x, b[e].y), T());
        mma(sums[i][e], WORDS4(low.z, high.z, low.w, high.w), WORDS2(b[e].z, b[e].w), T());
      }
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  ASYNC_WAIT(0);
  BARRIER();
  float* parts = (float*)room;
  UNROLL for (int i = 0; i < TILES; i++) {
    UNROLL for (int e = 0; e < EIGHTS; e++) {
      float* at = parts + (WARP * TOKENS + 8 * e + 2 * t) * LINE + 16 * i + g;
      at[0] = sums[i][e].x;
      at[LINE] = sums[i][e].y;
      at[8] = sums[i][e].z;
      at[LINE + 8] = sums[i][e].w;
    }
  }
  BARRIER();
  for (int each = THREAD; each < M * OUTPUTS; each += ALL) {
    const int m = each / OUTPUTS, n = first + each % OUTPUTS;
    if (n < N) {
      float sum = BIAS(n);
      UNROLL for (int warp = 0; warp < WARPS; warp++) sum += parts[(warp * TOKENS + m) * LINE + each % OUTPUTS];
      y[(size_t)m * N + n] = T(sum);
    }
  }
"""
