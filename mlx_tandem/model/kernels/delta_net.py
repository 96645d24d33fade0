"""Kernels around the gated delta rule: one for all work of a layer between its products and the rule, one for the norm
behind the rule.

Before the rule, a layer convolves its products with those of the tokens before, applies SiLU, gives queries and keys
unit length, and computes decay and strength. MLX's own operations need some twenty kernels for that, most of which take
longer to start than to run. `DeltaNetInputs` does it in one kernel, which reads the last products of each row from a
line of the pool and writes the new ones to a line of the pool. `GatedNorm` is the norm behind the rule. Both kernels
round numbers where mlx-lm's operations round them.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Make, Source
from mlx_tandem.model.kernels.gated_delta import RuleInputs
from mlx_tandem.model.ops.attention.paged import bits_of

WARPS = 4
"""Warps in a block of threads."""

_FUNCTIONS = r"""
DEVICE float exponential(float x) { return EXP2(x * 1.44269504f); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
"""

_INPUTS = r"""
  constexpr int EACH = DIM / 32, LINES = 2 * HK + HV, CHANNELS = LINES * DIM;
  const int line = GROUP_X * (THREADS / 32) + WARP, row = GROUP_Y, length = qkv_shape[0] / GROUPS_Y;
  if (line > LINES) return;
  if (line == LINES) {  // one warp computes decay and strength of all heads
    for (int i = LANE; i < length * HV; i += 32) {
      const int head = i % HV;
      const size_t token = (size_t)row * length + i / HV;
      const float x = float(T(float(a[token * A_WIDTH + A_AT + head]) + float(dt_bias[head])));
      const float from_zero = x < 0.0f ? x : -x;
      const float softplus = float(T(max(x, 0.0f) + LOG2(1.0f + exponential(from_zero)) * 0.69314718f));
      decay[token * HV + head] = exponential(-exponential(float(a_log[head])) * softplus);
      strength[token * HV + head] = T(sigmoid(float(b[token * B_WIDTH + B_AT + head])));
    }
    return;
  }
  // A warp has the DIM channels of one head, and a lane every 32nd of them.
  const int first = line * DIM + LANE;
  const size_t width = (size_t)(TAPS - 1) * CHANNELS;  // the width of a line of the pool
  float past[TAPS - 1][EACH], taps[TAPS][EACH];
  UNROLL
  for (int j = 0; j < EACH; j++) {
    UNROLL
    for (int i = 0; i < TAPS - 1; i++) past[i][j] = float(pool[read[row] * width + i * CHANNELS + first + 32 * j]);
    UNROLL
    for (int i = 0; i < TAPS; i++) taps[i][j] = float(weight[(first + 32 * j) * TAPS + i]);
  }
  const int kind = line < HK ? 0 : line < 2 * HK ? 1 : 2;
  const int head = line - kind * HK, heads = kind == 2 ? HV : HK;
  auto to = kind == 0 ? q : kind == 1 ? k : v;
  for (int t = 0; t < length; t++) {
    const size_t token = (size_t)row * length + t;
    float x[EACH], squares = 0.0f;
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const float now = float(qkv[token * QKV_WIDTH + QKV_AT + first + 32 * j]);
      float sum = past[0][j] * taps[0][j];
      UNROLL
      for (int i = 1; i < TAPS - 1; i++) sum += past[i][j] * taps[i][j];
      sum += now * taps[TAPS - 1][j];
      UNROLL
      for (int i = 0; i < TAPS - 2; i++) past[i][j] = past[i + 1][j];
      past[TAPS - 2][j] = now;
      const float y = float(T(sum));
      x[j] = float(T(y * float(T(sigmoid(y)))));
      squares += x[j] * x[j];
    }
    if (kind < 2) {
      UNROLL
      for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
      const float norm = RSQRT(squares / DIM + 1e-6f / DIM);
      const float scale = float(T(kind == 0 ? 1.0f / DIM : RSQRT((float)DIM)));
      UNROLL
      for (int j = 0; j < EACH; j++) x[j] = float(T(float(T(x[j] * norm)) * scale));
    }
    UNROLL
    for (int j = 0; j < EACH; j++) to[(token * heads + head) * DIM + LANE + 32 * j] = T(x[j]);
  }
  auto kept = (GLOBAL T*)pool + write[row] * width;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    UNROLL
    for (int i = 0; i < TAPS - 1; i++) kept[i * CHANNELS + first + 32 * j] = T(past[i][j]);
  }
"""

_NORM = r"""
  constexpr int EACH = DIM / 32;
  const int line = GROUP_X * (THREADS / 32) + WARP;  // a head of a token
  if (line >= y_shape[0] * y_shape[1] * HV) return;
  const size_t token = line / HV;
  const int head = line % HV;
  float x[EACH], squares = 0.0f;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    x[j] = float(y[(size_t)line * DIM + LANE + 32 * j]);
    squares += x[j] * x[j];
  }
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  const float norm = RSQRT(squares / DIM + FLOAT_BITS((uint)EPSILON));
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const float gate = float(z[token * Z_WIDTH + Z_AT + head * DIM + LANE + 32 * j]);
    const float own = float(T(float(weight[LANE + 32 * j]) * float(T(x[j] * norm))));
    out[(size_t)line * DIM + LANE + 32 * j] = T(gate * sigmoid(gate) * own);
  }
"""


class Product(NamedTuple):
    """The output of a linear, which may be a part of a wider array.

    whole: the array [rows, length, width] or [rows · length, width]; at: the first column of the part.
    """

    whole: mx.array
    at: int = 0

    def template(self, name: str) -> dict[str, Constant]:
        """Return the constants with which a kernel finds the part."""
        return {f"{name}_AT": self.at, f"{name}_WIDTH": self.whole.shape[-1]}


class Mixer(NamedTuple):
    """The weights and dimensions of a layer that the kernels need.

    weight: the weight [channels, taps, 1] of the convolution; a_log, dt_bias: [heads], the weights of the decay; norm,
    epsilon: the weight [dim] and the epsilon of the norm behind the rule; key_heads: the number of heads of keys, and
    of queries; heads: the number of heads of values; dim: the width of every head.
    """

    weight: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    epsilon: float
    key_heads: int
    heads: int
    dim: int


class DeltaNetInputs:
    """The kernel that computes the inputs of the gated delta rule from a layer's products; `make` makes it."""

    def __init__(self, make: Make):
        names = ["qkv", "a", "b", "weight", "a_log", "dt_bias", "pool", "read", "write"]
        outputs = ["q", "k", "v", "decay", "strength"]
        self._kernel = make(Source("delta_net_inputs", names, outputs, _INPUTS, _FUNCTIONS, writes=["pool"]))

    def __call__(
        self,
        mixer: Mixer,
        products: tuple[Product, Product, Product],
        pool: mx.array,
        read: mx.array,
        write: mx.array,
    ) -> RuleInputs:
        """Write the last products into the pool, and return the inputs of the rule, which depend on this write.

        Args:
            mixer: The layer.
            products: The products of queries, keys and values side by side, of the decay, and of the strength.
            pool: [lines, (taps - 1) · channels], the last inputs of the convolution of each row, the oldest first.
            read: int32 [rows], the line of each row before the step.
            write: int32 [rows], the line of each row after the step. No line that is written belongs to another row.
        """
        qkv, a, b = products
        dtype, rows = qkv.whole.dtype, read.shape[0]
        length = qkv.whole.size // qkv.whole.shape[-1] // rows
        template: dict[str, Constant] = {
            "T": dtype,
            "HK": mixer.key_heads,
            "HV": mixer.heads,
            "DIM": mixer.dim,
            "TAPS": mixer.weight.shape[1],
            **qkv.template("QKV"),
            **a.template("A"),
            **b.template("B"),
        }
        lines = 2 * mixer.key_heads + mixer.heads + 1
        keys, values = (rows, length, mixer.key_heads, mixer.dim), (rows, length, mixer.heads, mixer.dim)
        gates = (rows, length, mixer.heads)
        flat = [product.whole.reshape(-1, product.whole.shape[-1]) for product in products]
        found = self._kernel(
            [*flat, mixer.weight, mixer.a_log, mixer.dt_bias, pool, read, write],
            template,
            (-(-lines // WARPS), rows, 1),
            32 * WARPS,
            [(keys, dtype), (keys, dtype), (values, dtype), (gates, mx.float32), (gates, dtype)],
        )
        return RuleInputs(*found)


class GatedNorm:
    """The kernel of the norm behind the rule, with its gates; `make` makes it."""

    def __init__(self, make: Make):
        names = ["y", "z", "weight"]
        self._kernel = make(Source("gated_norm", names, ["out"], _NORM, _FUNCTIONS))

    def __call__(self, mixer: Mixer, y: mx.array, z: Product) -> mx.array:
        """Return the outputs [rows, length, heads · dim] for the outputs y [rows, length, heads, dim] of the rule and
        the product of the gates. If `z.whole` has two axes, the result is [rows · length, heads · dim].
        """
        rows, length, heads, dim = y.shape
        template: dict[str, Constant] = {
            "T": y.dtype,
            "HV": heads,
            "DIM": dim,
            "EPSILON": bits_of(mixer.epsilon),
            **z.template("Z"),
        }
        (out,) = self._kernel(
            [y, z.whole, mixer.norm],
            template,
            (-(-rows * length * heads // WARPS), 1, 1),
            32 * WARPS,
            [((*z.whole.shape[:-1], heads * dim), y.dtype)],
        )
        return out
