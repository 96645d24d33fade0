"""The product of few rows by a linear's weights: weights are read once, at the speed of memory, by one small kernel.

A block has 16 · TILES outputs. Its warps take turns at slices of the inputs, each slice as wide as two lines of the
cache at most, and what they have summed is added up in the order of warps. So in one form the sum of a row does not
depend on how many others there are. Weights go from memory to tensor cores without a stop: a lane loads eight
neighbours of a row, which are inputs of two products of matrices; the order of inputs is the same for `x`, and so none
that matters. `x`, which all blocks read, stays in the cache.

For CUDA only: the body uses `mma`.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make


class Form(NamedTuple):
    """How the work is cut: blocks of 16 · tiles outputs and of so many warps, which take 32 · chunks inputs at once."""

    tiles: int = 2
    warps: int = 8
    chunks: int = 2


def forms(tokens: int) -> tuple[Form, ...]:
    """Those that are worth a trial."""
    return (Form(2, 8, 2), Form(1, 16, 2)) if tokens <= 16 else (Form(2, 8, 2),)


class Skinny:
    """The kernel for one target. 16-bit types only."""

    def __init__(self, make: Make):
        self._kernel = cache(lambda biased: _kernel(make, biased))

    def __call__(self, x: mx.array, weight: mx.array, bias: mx.array | None, form: Form) -> mx.array:
        """x @ weight.T + bias for x [rows, length, inputs] of no more tokens than `eighths` knows, weight [outputs,
        inputs] and bias [outputs], contiguous and of one type."""
        rows, length, _ = x.shape
        outputs = weight.shape[0]
        template: dict[str, Constant] = {"T": x.dtype, "EIGHTS": eighths(rows * length)}
        template |= {"TILES": form.tiles, "WARPS": form.warps, "CHUNKS": form.chunks}
        (y,) = self._kernel(bias is not None)(
            [x, weight] if bias is None else [x, weight, bias],
            template,
            (-(-outputs // (16 * form.tiles)), 1, 1),
            32 * form.warps,
            [((rows, length, outputs), x.dtype)],
        )
        return y


EIGHTHS = (1, 2, 3, 4, 6, 8)
"""Numbers of products of eight tokens: each has a kernel of its own."""


def eighths(tokens: int) -> int:
    """How many so many tokens take; 0: they are too many."""
    return next((n for n in EIGHTHS if 8 * n >= tokens), 0)


def fits(weight: mx.array, bias: mx.array | None) -> bool:
    """Whether a linear of these can be computed: rows are loaded 16 bytes at a time, and all is of one type."""
    alike = bias is None or bias.dtype == weight.dtype
    return weight.dtype in (mx.bfloat16, mx.float16) and weight.shape[1] % 8 == 0 and alike


def _kernel(make: Make, biased: bool) -> Kernel:
    name, inputs, bias = ("skinny_biased", ["bias"], "float(bias[n])") if biased else ("skinny", [], "0.0f")
    return make(name, ["x", "weight", *inputs], ["y"], f"#define BIAS(n) {bias}\n" + _BODY, _FUNCTIONS)


_FUNCTIONS = """
// Of `ROWS` rows of weights what a warp multiplies at once: a lane's eighth of 32 inputs, `CHUNKS` times.
template <int ROWS, int CHUNKS>
struct Slice {
  uint4 at[CHUNKS][ROWS];
};

template <typename T, int ROWS, int CHUNKS>
DEVICE void fetch(Slice<ROWS, CHUNKS>& slice, const GLOBAL T* weight, const int* starts, int k, int K) {
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    UNROLL for (int r = 0; r < ROWS; r++) {
      slice.at[c][r] = k + 32 * c < K ? STREAM16(weight + starts[r] + k + 32 * c) : WORDS4(0u, 0u, 0u, 0u);
    }
  }
}

template <typename T, int TILES, int EIGHTS, int CHUNKS>
DEVICE void multiply(
    float4 (&sums)[TILES][EIGHTS], const Slice<2 * TILES, CHUNKS>& slice, const GLOBAL T* x, const int* starts,
    int k, int K) {
  UNROLL for (int c = 0; c < CHUNKS; c++) {
    uint4 xs[EIGHTS];
    UNROLL for (int e = 0; e < EIGHTS; e++) {
      xs[e] = k + 32 * c < K ? LOAD16(x + starts[e] + k + 32 * c) : WORDS4(0u, 0u, 0u, 0u);
    }
    UNROLL for (int i = 0; i < TILES; i++) {
      const uint4 low = slice.at[c][2 * i], high = slice.at[c][2 * i + 1];
      UNROLL for (int e = 0; e < EIGHTS; e++) {
        mma(sums[i][e], WORDS4(low.x, high.x, low.y, high.y), WORDS2(xs[e].x, xs[e].y), T());
        mma(sums[i][e], WORDS4(low.z, high.z, low.w, high.w), WORDS2(xs[e].z, xs[e].w), T());
      }
    }
  }
}
"""

# GROUP_X: which outputs. While a warp multiplies one slice, the next one is on its way.
_BODY = """
  constexpr int OUTPUTS = 16 * TILES, ROOM = OUTPUTS + 4, TOGETHER = EIGHTS < 2 ? 1 : 2;
  SHARED(float, parts, WARPS * TOGETHER * 8 * ROOM);
  const int K = weight_shape[1], N = weight_shape[0], M = x_shape[0] * x_shape[1];
  const int g = LANE / 4, t = LANE % 4, first = GROUP_X * OUTPUTS;
  const GLOBAL T* own = weight + (size_t)first * K;
  int w_starts[2 * TILES], x_starts[EIGHTS];
  UNROLL for (int r = 0; r < 2 * TILES; r++) w_starts[r] = min(8 * r + g, N - 1 - first) * K;
  UNROLL for (int e = 0; e < EIGHTS; e++) x_starts[e] = min(8 * e + g, M - 1) * K;
  float4 sums[TILES][EIGHTS];
  UNROLL for (int i = 0; i < TILES; i++) {
    UNROLL for (int e = 0; e < EIGHTS; e++) sums[i][e] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  Slice<2 * TILES, CHUNKS> even, odd;
  const int step = 32 * CHUNKS * WARPS;
  int k = 32 * CHUNKS * WARP + 8 * t;
  fetch(even, own, w_starts, k, K);
  for (; k - 8 * t < K; k += 2 * step) {
    fetch(odd, own, w_starts, k + step, K);
    multiply(sums, even, x, x_starts, k, K);
    fetch(even, own, w_starts, k + 2 * step, K);
    multiply(sums, odd, x, x_starts, k + step, K);
  }
  UNROLL for (int e = 0; e < EIGHTS; e += TOGETHER) {
    UNROLL for (int j = 0; j < TOGETHER && e + j < EIGHTS; j++) {
      UNROLL for (int i = 0; i < TILES; i++) {
        const int at = ((WARP * TOGETHER + j) * 8 + 2 * t) * ROOM + 16 * i + g;
        parts[at] = sums[i][e + j].x;
        parts[at + ROOM] = sums[i][e + j].y;
        parts[at + 8] = sums[i][e + j].z;
        parts[at + ROOM + 8] = sums[i][e + j].w;
      }
    }
    BARRIER();
    for (int each = THREAD; each < TOGETHER * 8 * OUTPUTS; each += THREADS) {
      const int m = each / OUTPUTS, n = first + each % OUTPUTS;
      if (8 * e + m < M && n < N) {
        float sum = BIAS(n);
        for (int warp = 0; warp < WARPS; warp++) sum += parts[(warp * TOGETHER * 8 + m) * ROOM + each % OUTPUTS];
        y[(size_t)(8 * e + m) * N + n] = T(sum);
      }
    }
    BARRIER();
  }
"""
