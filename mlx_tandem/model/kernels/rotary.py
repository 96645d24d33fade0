"""One kernel from the products of q, k and v to attention: norms of the heads, rotation, and the write into the KV
pool.

A warp has one head of one token, and a lane has pairs of numbers. The two numbers of each of the first TURNED pairs are
rotated together; if only a part of a head is rotated, the other pairs are those of the rest of it. Queries come out in
the layout that attention wants; keys and values go into the pool in its format, quantised if need be. The kernel writes
the pool in place, although MLX takes it for an input: an operation that reads the new positions must also depend on
another output of this kernel, which orders it behind the write.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.dialect import Constant, Make, Source
from mlx_tandem.model.kernels.paged_attention import floats, integers

WARPS = 4
"""Warps of a block of threads."""

_FUNCTIONS = r"""
DEVICE uint bfloat_bits(float x) {
  const uint w = WORD_BITS(x);
  return x == x ? (w + 0x7fffu + ((w >> 16) & 1u)) >> 16 : 0x7fc0u;
}
#define FIRST(p) ((p) < TURNED ? (p) : (p) + TURNED)
#define SECOND(p) ((p) < TURNED ? (p) + TURNED : (p) + HALF)
"""

_BODY = r"""
  constexpr int LINES = HEADS + 2 * KV_HEADS, HALF = D / 2, TURNED = ROTATED / 2, EACH = (HALF + 31) / 32;
  const int length = slots_shape[1], tokens = slots_shape[0] * length;
  const int line = GROUP_X * (THREADS / 32) + WARP, token = line / LINES, head = line % LINES;
  if (token >= tokens) return;
  const int row = token / length, at = token % length;
  const int kind = head < HEADS ? 0 : head < HEADS + KV_HEADS ? 1 : 2;
  const int own = head - (kind == 0 ? 0 : kind == 1 ? HEADS : HEADS + KV_HEADS);
  // q, k and v are side by side in one array, or each in its own. Each query may be followed by its gate.
  constexpr int QUERY = GATED ? 2 * D : D, QUERIES = HEADS * QUERY, KEYS = KV_HEADS * D;
  const int before = kind == 0 ? own * QUERY : own * D + (JOINED ? QUERIES + (kind - 1) * KEYS : 0);
  const int width = JOINED ? QUERIES + 2 * KEYS : kind == 0 ? QUERIES : KEYS;
  auto from = (kind == 0 ? q : kind == 1 ? k : v) + (size_t)token * width + before;
  float low[EACH], high[EACH];  // numbers FIRST(p) and SECOND(p)
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const int p = LANE + 32 * j;
    low[j] = p < HALF ? float(from[FIRST(p)]) : 0.0f;
    high[j] = p < HALF ? float(from[SECOND(p)]) : 0.0f;
  }
  if (kind < 2) {
    if (NORMED) {
      float squares = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) squares += low[j] * low[j] + high[j] * high[j];
      UNROLL
      for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
      const float scale = RSQRT(squares / D + epsilons[0]);
      UNROLL
      for (int j = 0; j < EACH; j++) {
        const int p = LANE + 32 * j;
        if (p < HALF) {  // rounded where MLX's own norm rounds
          const float a = float(kind == 0 ? q_weight[FIRST(p)] : k_weight[FIRST(p)]);
          const float b = float(kind == 0 ? q_weight[SECOND(p)] : k_weight[SECOND(p)]);
          low[j] = float(T(a * float(T(low[j] * scale))));
          high[j] = float(T(b * float(T(high[j] * scale))));
        }
      }
    }
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < TURNED) {
        const float c = cosines[(size_t)token * TURNED + p], s = sines[(size_t)token * TURNED + p];
        const float a = low[j], b = high[j];
        low[j] = float(T(a * c - b * s));
        high[j] = float(T(a * s + b * c));
      }
    }
  }
  if (kind == 0) {
    auto to = queries + (((size_t)row * HEADS + head) * length + at) * D;
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < HALF) to[FIRST(p)] = T(low[j]), to[SECOND(p)] = T(high[j]);
    }
    return;
  }
  const bool is_key = kind == 1;
  const int slot = slots[token];
  if (slot < BLOCK) {  // padding, which must stay finite
    UNROLL
    for (int j = 0; j < EACH; j++) low[j] = high[j] = 0.0f;
  }
  const size_t into = (size_t)own * sizes[0] + slot;
#if CODED
  constexpr int TOP = (1 << BITS) - 1, GROUP = D / GRIDS;
  UNROLL
  for (int g = 0; g < GRIDS; g++) {
    float least = 3e38f, most = -3e38f, all = 0.0f;
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < HALF && FIRST(p) / GROUP == g) least = min(least, low[j]), most = max(most, low[j]), all += low[j];
      if (p < HALF && SECOND(p) / GROUP == g) least = min(least, high[j]), most = max(most, high[j]), all += high[j];
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      least = min(least, SHUFFLE_XOR(least, mask));
      most = max(most, SHUFFLE_XOR(most, mask));
      all += SHUFFLE_XOR(all, mask);
    }
    // As in kvformat.py: rounded down, so that the grid covers the group; not finite where a number is not.
    const uint low_bits = bfloat_bits(least - (least < 0.0f ? -least : least) * 0.00390625f + 0.0f * all);
    const float lowest = FLOAT_BITS(low_bits << 16);
    const uint step_bits = bfloat_bits(max((most - lowest) * (1.00390625f / TOP), 1e-30f));
    const float distance = FLOAT_BITS(step_bits << 16);
    UNROLL
    for (int k = 0; k < 2 * EACH; k++) {
      const int p = LANE + 32 * (k / 2), number = k % 2 ? SECOND(p) : FIRST(p);
      const bool mine = p < HALF && number / GROUP == g;
      const float v = k % 2 ? high[k / 2] : low[k / 2];
      const uint code = mine ? (uint)min(max((v - lowest) / distance + 0.5f, 0.0f), (float)TOP) : 0u;
      if (BITS == 8) {
        auto codes = (GLOBAL unsigned char*)(is_key ? keys : values);
        if (mine) codes[into * D + number] = (unsigned char)code;
      } else {
        const uint next = SHUFFLE_XOR(code, 1);
        auto codes = (GLOBAL unsigned char*)(is_key ? keys : values);
        if (mine && LANE % 2 == 0) codes[(into * D + number) / 2] = (unsigned char)(code | next << 4);
      }
      if (mine && FETCHED) (k % 2 ? high[k / 2] : low[k / 2]) = float(T(code * distance + lowest));
    }
    if (LANE == 0) ((GLOBAL uint*)(is_key ? key_grids : value_grids))[into * GRIDS + g] = step_bits << 16 | low_bits;
  }
#else
  auto to = (GLOBAL T*)(is_key ? keys : values) + into * D;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const int p = LANE + 32 * j;
    if (p < HALF) to[FIRST(p)] = T(low[j]), to[SECOND(p)] = T(high[j]);
  }
#endif
  if (FETCHED) {
    auto out = (is_key ? new_keys : new_values) + (((size_t)row * KV_HEADS + own) * length + at) * D;
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < HALF) out[FIRST(p)] = T(low[j]), out[SECOND(p)] = T(high[j]);
    }
  }
"""


class Rotary:
    """The kernel for layers whose rows have one format in the pool; `make` makes it."""

    def __init__(self, make: Make, form: RowFormat, block_size: int):
        self._form = form
        self._block_size = block_size
        pool = ["keys", "key_grids", "values", "value_grids"] if form.bits else ["keys", "values"]
        self._pool = pool
        self._kernel = make(
            Source(
                "rotary",
                ["q", "k", "v", "cosines", "sines", "slots", "sizes", "epsilons", "q_weight", "k_weight", *pool],
                ["queries", "new_keys", "new_values"],
                _BODY,
                _FUNCTIONS + f"#define CODED {int(bool(form.bits))}\n",
                writes=pool,
            )
        )

    def __call__(
        self,
        parts: Sequence[mx.array],
        angles: tuple[mx.array, mx.array],
        slots: mx.array,
        pool: Sequence[mx.array],
        *,
        norms: tuple[mx.array, mx.array, float] | None,
        fetched: bool,
        gated: bool = False,
    ) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries [rows, heads, length, dim], and if `fetched` the new keys and values as the pool holds
        them.

        Args:
            parts: The products of q, k and v [rows, length, heads or kv heads · dim], or one array that holds them all;
                [rows, …] will do if the length is 1.
            angles: Cosines and sines, float32 [rows, 1, length, rotated / 2]. The first `rotated` numbers of each head
                are rotated; if these are not all of them, `rotated` is a multiple of four.
            slots: int32 [rows, length], as in `StepView`.
            pool: The arrays of the layer's pool.
            norms: Weights of the queries' and keys' norms, and epsilon; None: no norms.
            fetched: Whether to return new keys and values, each [rows, kv heads, length, dim].
            gated: Whether the product of q has a gate of `dim` numbers behind each head. The kernel skips the gates.
        """
        form = self._form
        joined = len(parts) == 1
        q, k, v = (parts[0],) * 3 if joined else parts
        rows, length = slots.shape
        heads = (q.shape[-1] // form.dim - (2 * form.heads if joined else 0)) // (2 if gated else 1)
        template: dict[str, Constant] = {
            "T": q.dtype,
            "D": form.dim,
            "HEADS": heads,
            "KV_HEADS": form.heads,
            "BLOCK": self._block_size,
            "ROTATED": 2 * angles[0].shape[-1],
            "JOINED": joined,
            "GATED": gated,
            "NORMED": norms is not None,
            "FETCHED": fetched,
        }
        if form.bits:
            template |= {"BITS": form.bits, "GRIDS": form.groups}
        q_weight, k_weight, epsilon = norms or (*angles, 0.0)
        inputs = [
            q,
            k,
            v,
            *angles,
            slots,
            integers(pool[0].shape[0] // form.heads),
            floats(epsilon),
            q_weight,
            k_weight,
            *pool,
        ]
        new = (rows, form.heads, length, form.dim) if fetched else (1,)
        lines = rows * length * (heads + 2 * form.heads)
        queries, keys, values = self._kernel(
            inputs,
            template,
            (-(-lines // WARPS), 1, 1),
            32 * WARPS,
            [((rows, heads, length, form.dim), q.dtype), (new, q.dtype), (new, q.dtype)],
        )
        return queries, keys, values
