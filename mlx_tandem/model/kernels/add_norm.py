"""Kernel for the sum of two arrays and the RMS norm of that sum, which lie between the parts of a transformer's layer.

A block of threads has one row, so a row's results do not depend on other rows. The sum is rounded to its type before
the norm reads it, and the normed numbers are rounded before they are multiplied by the weight, as MLX's own operations
do. For few rows both operations take longer to start than to run, so one kernel takes half of their time.

The second array may be given as parts, which this kernel adds up. A kernel apart would take as long again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source
from mlx_tandem.model.ops.attention.paged import bits_of

EACH = 4
"""Neighbouring numbers of a row that a thread has at a time."""

MOST_THREADS = 1024
"""Most threads of a block."""

_FUNCTIONS = r"""
template <class T> struct alignas(4 * sizeof(T)) Four {
  T of[4];
};
"""

_BODY = r"""
  constexpr int RUNS = (D + 4 * WIDTH - 1) / (4 * WIDTH);  // WIDTH is the number of threads
  const size_t at = (size_t)GROUP_X * D;
  float own[4 * RUNS], squares = 0.0f;
  uint2 scale[RUNS];
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int number = 4 * (i * WIDTH + THREAD);
    const bool there = number < D;
    const int from = there ? number : 0;
    const uint2 x = LOAD8(a + at + from);
    scale[i] = LOAD8(weight + from);
    const float2 x0 = pair(x.x, T()), x1 = pair(x.y, T());
    float2 y0, y1;
#if DIVIDED
    float4 y = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    UNROLL
    for (int part = 0; part < PARTS; part++) {
      const uint4 words = LOAD16(b + (size_t)part * GROUPS_X * D + at + from);
      y.x += FLOAT_BITS(words.x), y.y += FLOAT_BITS(words.y);
      y.z += FLOAT_BITS(words.z), y.w += FLOAT_BITS(words.w);
    }
    y0.x = float(T(y.x)), y0.y = float(T(y.y)), y1.x = float(T(y.z)), y1.y = float(T(y.w));
#else
    const uint2 y = LOAD8(b + at + from);
    y0 = pair(y.x, T()), y1 = pair(y.y, T());
#endif
    Four<T> both;
    both.of[0] = T(x0.x + y0.x), both.of[1] = T(x0.y + y0.y);
    both.of[2] = T(x1.x + y1.x), both.of[3] = T(x1.y + y1.y);
    if (there) *(GLOBAL Four<T>*)(sum + at + from) = both;
    UNROLL
    for (int j = 0; j < 4; j++) {
      own[4 * i + j] = there ? float(both.of[j]) : 0.0f;
      squares += own[4 * i + j] * own[4 * i + j];
    }
  }
  SHARED(float, sums, 32);
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  if (LANE == 0) sums[WARP] = squares;
  BARRIER();
  squares = LANE < WIDTH / 32 ? sums[LANE] : 0.0f;
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  const float norm = RSQRT(squares / D + FLOAT_BITS((uint)EPSILON));
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int number = 4 * (i * WIDTH + THREAD);
    if (number >= D) break;
    const float2 w0 = pair(scale[i].x, T()), w1 = pair(scale[i].y, T());
    const float w[4] = {w0.x, w0.y, w1.x, w1.y};
    Four<T> made;
    UNROLL
    for (int j = 0; j < 4; j++) made.of[j] = T(w[j] * float(T(own[4 * i + j] * norm)));
    *(GLOBAL Four<T>*)(normed + at + number) = made;
  }
"""


class Norm(NamedTuple):
    """The weight [dim] and the epsilon of an RMS norm."""

    weight: mx.array
    epsilon: float


class AddNorm:
    """The kernel that adds two arrays and norms the sum; `make` makes it."""

    def __init__(self, make: Make):
        self._plain, self._divided = _kernel(make, divided=False), _kernel(make, divided=True)

    def __call__(
        self, a: mx.array, b: mx.array, norm: Norm, shape: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return a + b and its norm for a and b [..., dim] of the weight's type.

        b may also be float32 parts [parts, *a.shape], which are added up and rounded first. The type has 16 bits, and
        `dim` is a multiple of EACH. shape: that of both results; None: the shape of a.
        """
        dim, shape = a.shape[-1], a.shape if shape is None else shape
        threads = min(MOST_THREADS, -(-dim // (32 * EACH)) * 32)
        divided = b.ndim > a.ndim
        assert b.dtype == (mx.float32 if divided else a.dtype) and b.size % a.size == 0
        template: dict[str, Constant] = {"T": a.dtype, "D": dim, "WIDTH": threads, "EPSILON": bits_of(norm.epsilon)}
        if divided:
            template["PARTS"] = b.shape[0]
        total, normed = (self._divided if divided else self._plain)(
            [a, b, norm.weight],
            template,
            (a.size // dim, 1, 1),
            threads,
            [(shape, a.dtype), (shape, a.dtype)],
        )
        return total, normed


def _kernel(make: Make, *, divided: bool) -> Kernel:
    name = "add_norm_parts" if divided else "add_norm"
    body = f"#define DIVIDED {int(divided)}\n" + _BODY
    return make(Source(name, ["a", "b", "weight"], ["sum", "normed"], body, _FUNCTIONS))
