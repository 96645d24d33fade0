"""Kernel for SwiGLU, silu(gate) · up. It reads gates and ups side by side from one array, a merged linear's output.

mlx-lm's function takes two arrays, so the product would have to be split first. As in MLX's kernels for CUDA, the
result of every operation is rounded to the arrays' type before the next operation reads it, and the exponential
function is the one that MLX calls there. So the results are meant to be those of MLX bit for bit.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Make, Source

EACH = 8
"""Neighbouring numbers of a row that a thread computes: 16 bytes."""

TYPES = (mx.bfloat16, mx.float16)
"""Types of the arrays that the kernel is for."""

MOST_THREADS = 128
"""Most threads of a block."""

_FUNCTIONS = r"""
template <class T> struct alignas(8 * sizeof(T)) Eight {
  T of[8];
};
template <class T> DEVICE T swiglu(float gate, float up, T) {
  const T exp_abs = EXP(T(gate < 0.0f ? -gate : gate));
  const T sum = T(1.0f + float(exp_abs));
  const T part = T(1.0f / float(sum));  // the sigmoid of -|gate|
  const T sigmoid = gate < 0.0f ? part : T(1.0f - float(part));
  const T silu = T(gate * float(sigmoid));
  return T(float(silu) * up);
}
"""

_BODY = r"""
  const int column = 8 * (GROUP_X * THREADS + THREAD);
  if (column >= HIDDEN) return;
  const GLOBAL T* from = joined + (size_t)GROUP_Y * 2 * HIDDEN + column;
  const uint4 g = LOAD16(from), u = LOAD16(from + HIDDEN);
  const uint gates[4] = {g.x, g.y, g.z, g.w}, ups[4] = {u.x, u.y, u.z, u.w};
  Eight<T> result;
  UNROLL
  for (int i = 0; i < 4; i++) {
    const float2 gate = pair(gates[i], T()), up = pair(ups[i], T());
    result.of[2 * i] = swiglu(gate.x, up.x, T());
    result.of[2 * i + 1] = swiglu(gate.y, up.y, T());
  }
  *(GLOBAL Eight<T>*)(activated + (size_t)GROUP_Y * HIDDEN + column) = result;
"""


class SwiGLU:
    """The kernel that computes SwiGLU; `make` makes it."""

    def __init__(self, make: Make):
        self._kernel = make(Source("swiglu", ["joined"], ["activated"], _BODY, _FUNCTIONS))

    def __call__(self, joined: mx.array) -> mx.array:
        """Return silu(gate) · up [..., hidden] for joined [..., 2 · hidden], whose rows hold the gates, then the ups.

        The type is one of TYPES, and `hidden` is a multiple of EACH.
        """
        *lead, both = joined.shape
        hidden = both // 2
        threads = min(MOST_THREADS, -(-hidden // (32 * EACH)) * 32)
        (activated,) = self._kernel(
            [joined],
            {"T": joined.dtype, "HIDDEN": hidden},
            (-(-hidden // (EACH * threads)), joined.size // both, 1),
            threads,
            [((*lead, hidden), joined.dtype)],
        )
        return activated
