"""Kernel of the gated delta rule, by which recurrent layers of Qwen3-Next, Qwen3.5 and others update their states.

A warp has `ROWS` rows of one head's state, a lane has every 32nd part of their columns, and the rows stay in registers
over all tokens. The state is read from lines of the pool and written to lines of it in place, or from and to arrays of
its own.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Make, Source

WARPS = 4
"""Warps of a block of threads."""

ROWS = 4
"""Rows of the state that a warp has at once, so that it need not wait for the sums of one."""

_BODY = r"""
  constexpr int EACH = DK / 32;
  const int row = GROUP_Z, head = GROUP_Y, from_head = head / (HV / HK);
  const int first = (GROUP_X * (THREADS / 32) + WARP) * ROWS;
  if (first >= DV) return;
  const int length = v_shape[1];
  const size_t within = ((size_t)head * DV + first) * DK + LANE * EACH;
  const size_t width = (size_t)HV * DV * DK;
  float s[ROWS][EACH];
  constexpr bool BY_FOUR = EACH % 4 == 0 && sizeof(S) == 4;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const bool none = BEGINS || first + r >= DV;
    const auto from = state + (none ? 0 : (size_t)read[row] * width + within + r * DK);
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (BY_FOUR) {
        const uint4 four = none ? WORDS4(0u, 0u, 0u, 0u) : LOAD16(from + j);
        s[r][j] = FLOAT_BITS(four.x), s[r][(j + 1) % EACH] = FLOAT_BITS(four.y);
        s[r][(j + 2) % EACH] = FLOAT_BITS(four.z), s[r][(j + 3) % EACH] = FLOAT_BITS(four.w);
      } else {
        s[r][j] = none ? 0.0f : float(from[j]);
      }
    }
  }
  size_t token = (size_t)row * length;
  for (int t = 0; t < length; t++, token++) {
    float keys[EACH], queries[EACH], kept[EACH];
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const size_t at = (token * HK + from_head) * DK + LANE * EACH + j;
      keys[j] = float(k[at]);
      queries[j] = float(q[at]);
      kept[j] = BY_COLUMN ? float(g[(token * HV + head) * DK + LANE * EACH + j]) : float(g[token * HV + head]);
    }
    const float rate = float(beta[token * HV + head]);
    float found[ROWS], out[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      found[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] *= kept[j];
        found[r] += s[r][j] * keys[j];
      }
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      UNROLL
      for (int r = 0; r < ROWS; r++) found[r] += SHUFFLE_XOR(found[r], mask);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float value = first + r < DV ? float(v[(token * HV + head) * DV + first + r]) : 0.0f;
      const float change = (value - found[r]) * rate;
      out[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] += keys[j] * change;
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
  auto to = IN_PLACE ? (GLOBAL S*)state : (GLOBAL S*)after;
  const size_t line = IN_PLACE ? (size_t)write[row] : (size_t)row;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const auto into = to + line * width + within + r * DK;
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (first + r >= DV) continue;
      if (BY_FOUR) {
        STORE16(into + j, WORDS4(WORD_BITS(s[r][j]), WORD_BITS(s[r][(j + 1) % EACH]),
                                 WORD_BITS(s[r][(j + 2) % EACH]), WORD_BITS(s[r][(j + 3) % EACH])));
      } else {
        into[j] = S(s[r][j]);
      }
    }
  }
  if (IN_PLACE && GROUP_X + GROUP_Y + GROUP_Z + THREAD == 0) after[0] = S(0.0f);
"""


class Given(NamedTuple):
    """The inputs of the rule over `length` tokens.

    q, k: [rows, length, key heads, DK]; v: [rows, length, heads, DV]; g: the share of the state that is kept,
    [rows, length, heads], or [rows, length, heads, DK] for each column; beta: [rows, length, heads].
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def fits(given: Given) -> bool:
    """Return whether the kernel computes inputs of this form."""
    return given.q.shape[-1] % 32 == 0 and given.q.shape[-1] <= 256


class GatedDelta:
    """The kernel for one target."""

    def __init__(self, make: Make):
        inputs = ["q", "k", "v", "g", "beta", "state", "read", "write"]
        self._kernel = make(Source("gated_delta", inputs, ["y", "after"], _BODY))
        self._in_place = make(Source("gated_delta_in_place", inputs, ["y", "after"], _BODY, writes=["state"]))

    def __call__(self, given: Given, state: mx.array | None) -> tuple[mx.array, mx.array]:
        """Return the layer's output [rows, length, heads, DV] in the type of `q`, and the states after all tokens.

        state: [rows, heads, DV, DK]; None: it begins with zeros, and the states after are float32.
        """
        rows, _, heads, dv = given.v.shape
        dk = given.q.shape[-1]
        lines = mx.arange(rows, dtype=mx.int32)
        pool = mx.zeros((1, 1), mx.float32) if state is None else state.reshape(rows, -1)
        y, after = self._run(given, pool, lines, lines, begins=state is None, after=(rows, heads, dv, dk))
        return y, after

    def in_place(self, given: Given, pool: mx.array, read: mx.array, write: mx.array) -> tuple[mx.array, mx.array]:
        """Return the output, and a zero [1] that depends on the write of the new states into the pool.

        pool: [lines, heads · DV · DK]; read, write: int32 [rows], the line of each row's state before and after. No
        line that is written belongs to another row.
        """
        y, done = self._run(given, pool, read, write, begins=False, after=None)
        return y, done

    def _run(
        self,
        given: Given,
        pool: mx.array,
        read: mx.array,
        write: mx.array,
        *,
        begins: bool,
        after: tuple[int, ...] | None,
    ) -> list[mx.array]:
        (rows, _, key_heads, dk), (heads, dv) = given.q.shape, given.v.shape[2:]
        template: dict[str, Constant] = {
            "T": given.q.dtype,
            "S": pool.dtype,
            "DK": dk,
            "DV": dv,
            "HK": key_heads,
            "HV": heads,
            "ROWS": ROWS,
            "BEGINS": begins,
            "BY_COLUMN": given.g.ndim == 4,
            "IN_PLACE": after is None,
        }
        kernel = self._in_place if after is None else self._kernel
        groups = (-(-dv // (WARPS * ROWS)), heads, rows)
        shaped = [(given.v.shape, given.q.dtype), (after or (1,), pool.dtype)]
        return kernel([*given, pool, read, write], template, groups, 32 * WARPS, shaped)
