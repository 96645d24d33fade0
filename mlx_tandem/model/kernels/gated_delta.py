"""Kernel of the gated delta rule, by which recurrent layers of Qwen3-Next, Qwen3.5 and others update their states.

For each token and head, with the state S [DV, DK]: S ← S · decay; S ← S + strength · (v − S k) kᵀ; y = S q
(https://arxiv.org/abs/2412.06464).

Each warp updates `ROWS` rows of one head's state. Each of its 32 lanes holds DK / 32 consecutive columns of these rows
in registers, for all tokens. The state is read from and written to lines of the pool (`in_place`), or read from one
array and written to a new one (`__call__`).
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Make, Source

WARPS = 4
"""Warps of a block of threads."""

ROWS = 4
"""Rows of the state per warp. Several rows hide the latency of the sums over a warp."""

_BODY = r"""
  constexpr int EACH = DK / 32;
  const int sequence = GROUP_Z, head = GROUP_Y, key_head = head / (HV / HK);
  const int first = (GROUP_X * (THREADS / 32) + WARP) * ROWS;  // row of the state
  if (first >= DV) return;
  const int length = v_shape[1];
  const size_t within = ((size_t)head * DV + first) * DK + LANE * EACH;
  const size_t width = (size_t)HV * DV * DK;  // of a line
  float s[ROWS][EACH];
  constexpr bool BY_FOUR = EACH % 4 == 0 && sizeof(S) == 4;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const bool outside = first + r >= DV;
    const auto source = state + (outside ? 0 : (size_t)read[sequence] * width + within + r * DK);
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (BY_FOUR) {
        const uint4 four = outside ? WORDS4(0u, 0u, 0u, 0u) : LOAD16(source + j);
        s[r][j] = FLOAT_BITS(four.x), s[r][(j + 1) % EACH] = FLOAT_BITS(four.y);
        s[r][(j + 2) % EACH] = FLOAT_BITS(four.z), s[r][(j + 3) % EACH] = FLOAT_BITS(four.w);
      } else {
        s[r][j] = outside ? 0.0f : float(source[j]);
      }
    }
  }
  size_t token = (size_t)sequence * length;
  for (int t = 0; t < length; t++, token++) {
    float keys[EACH], queries[EACH], decay[EACH];
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const size_t at = (token * HK + key_head) * DK + LANE * EACH + j;
      keys[j] = float(k[at]);
      queries[j] = float(q[at]);
      decay[j] = BY_COLUMN ? float(g[(token * HV + head) * DK + LANE * EACH + j]) : float(g[token * HV + head]);
    }
    const float strength = float(beta[token * HV + head]);
    float retrieved[ROWS], out[ROWS];  // S k and S q
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      retrieved[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] *= decay[j];
        retrieved[r] += s[r][j] * keys[j];
      }
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      UNROLL
      for (int r = 0; r < ROWS; r++) retrieved[r] += SHUFFLE_XOR(retrieved[r], mask);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float value = first + r < DV ? float(v[(token * HV + head) * DV + first + r]) : 0.0f;
      const float delta = (value - retrieved[r]) * strength;
      out[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] += keys[j] * delta;
        out[r] += s[r][j] * queries[j];
      }
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      UNROLL
      for (int r = 0; r < ROWS; r++) out[r] += SHUFFLE_XOR(out[r], mask);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
      if (LANE == r && first + r < DV) y[(token * HV + head) * DV + first + r] = T(out[r]);
  }
  auto target = (GLOBAL S*)AFTER;
  const size_t line = (size_t)write[sequence];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    if (first + r >= DV) continue;
    const auto row = target + line * width + within + r * DK;
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (BY_FOUR) {
        STORE16(row + j, WORDS4(WORD_BITS(s[r][j]), WORD_BITS(s[r][(j + 1) % EACH]),
                                WORD_BITS(s[r][(j + 2) % EACH]), WORD_BITS(s[r][(j + 3) % EACH])));
      } else {
        row[j] = S(s[r][j]);
      }
    }
  }
"""


class RuleInputs(NamedTuple):
    """The inputs of the rule over `length` tokens, as mlx-lm names them.

    q, k: [rows, length, key heads, DK]; v: [rows, length, heads, DV]; g: the decay, [rows, length, heads], or
    [rows, length, heads, DK] for each column of the state; beta: the strength, [rows, length, heads].
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def fits(inputs: RuleInputs) -> bool:
    """Return whether the kernel computes inputs of this form."""
    return inputs.q.shape[-1] % 32 == 0 and inputs.q.shape[-1] <= 256


class GatedDelta:
    """The kernel for one target."""

    def __init__(self, make: Make):
        names = ["q", "k", "v", "g", "beta", "state", "read", "write"]
        apart, in_place = "#define AFTER after\n", "#define AFTER state\n"
        self._kernel = make(Source("gated_delta", names, ["y", "after"], _BODY, apart))
        self._in_place = make(Source("gated_delta_in_place", names, ["y"], _BODY, in_place, writes=["state"]))

    def __call__(self, inputs: RuleInputs, state: mx.array) -> tuple[mx.array, mx.array]:
        """Return the outputs [rows, length, heads, DV] in the type of `q`, and the states after all tokens.

        state: [rows, heads, DV, DK], as the states after.
        """
        rows = mx.arange(state.shape[0], dtype=mx.int32)
        lines = state.reshape(state.shape[0], -1)
        y, after = self._kernel(*_call(inputs, lines, rows, rows, after=state.shape))
        return y, after

    def in_place(self, inputs: RuleInputs, pool: mx.array, read: mx.array, write: mx.array) -> mx.array:
        """Write the new states into the pool, and return the outputs, which depend on this write.

        pool: [lines, heads · DV · DK]; read, write: int32 [rows], the line of each row's state before and after. No
        line that is written belongs to another row.
        """
        (y,) = self._in_place(*_call(inputs, pool, read, write))
        return y


def _call(
    inputs: RuleInputs, pool: mx.array, read: mx.array, write: mx.array, *, after: tuple[int, ...] = ()
) -> tuple[list[mx.array], dict[str, Constant], tuple[int, int, int], int, list[tuple[tuple[int, ...], mx.Dtype]]]:
    """Return the arguments of a kernel. `after`: the shape of its second output; empty: it has none."""
    (rows, _, key_heads, dk), (heads, dv) = inputs.q.shape, inputs.v.shape[2:]
    template: dict[str, Constant] = {
        "T": inputs.q.dtype,
        "S": pool.dtype,
        "DK": dk,
        "DV": dv,
        "HK": key_heads,
        "HV": heads,
        "ROWS": ROWS,
        "BY_COLUMN": inputs.g.ndim == 4,
    }
    groups = (-(-dv // (WARPS * ROWS)), heads, rows)
    outputs: list[tuple[tuple[int, ...], mx.Dtype]] = [(inputs.v.shape, inputs.q.dtype)]
    outputs += [(after, pool.dtype)] if after else []
    return [*inputs, pool, read, write], template, groups, 32 * WARPS, outputs
