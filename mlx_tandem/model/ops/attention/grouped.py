"""Attention of adjacent rows that belong to one sequence, such as a newest token and the drafts behind it.

A block of threads has one sequence, one KV head, 16 of the queries that share it, and one split of the sequence's keys.
Its warps take tiles of 16 keys in turns and multiply them by tensor cores, so that every key and value is loaded once
for all 16 queries. The queries are ordered by row, then by head. Each warp keeps a softmax of its own, and all of them
are combined at the end.

Loaded numbers are operands of `mma` (`dialect.py`) without moving between lanes:

- Scores: a lane loads 8 adjacent numbers of a key, 16 bytes, which are the operands of two `mma`. `queries` has the
  numbers of the queries in the same order.
- Values: a lane loads 8 adjacent numbers of each of 4 values, packs the numbers of neighbouring values (2t and 2t + 1)
  into words, and passes each of the 8 numbers to an `mma` of its own. So column g of the m-th `mma` of half h is number
  64h + 8g + m.

The kernel is for CUDA only, for pools that hold numbers of 16 bits, and for layers without windows and sinks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import mlx.core as mx

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.dialect import Constant, Make, Source, bits_of
from mlx_tandem.model.ops.attention.division import Division
from mlx_tandem.model.ops.attention.paged import REGISTERS, SPANS, combining_kernel, in_splits

QUERIES = 16
"""Queries of a block of threads."""

WARPS = 4
"""Warps of a block of threads."""

DIMS = (64, 128)
"""Numbers of a head for which the kernel is written."""

_BODY = r"""
  constexpr int RUNS = D / 32, HALVES = D / 64, STEPS = D / 16, TILE = 16;
  // LOWEST is the maximum before the first key, and HIDDEN is the score of a hidden key. EXP2(HIDDEN - LOWEST) is 0.
  // Both are finite, because kernels may not use infinities.
  constexpr float LOWEST = -1e30f, HIDDEN = -3e38f;
  constexpr int PARTS = (GROUP * EACH + QUERIES - 1) / QUERIES;  // blocks of threads for the queries of a KV head
  const int g = LANE / 4, t = LANE % 4, width = tables_shape[1];
  const int kv_heads = GROUPS_X / PARTS, kv_head = GROUP_X / PARTS, from = GROUP_X % PARTS * QUERIES;
  const int row = GROUP_Y * EACH, heads = kv_heads * GROUP;  // `from` is the first query of this block of threads
  const int each = min(EACH, q_shape[0] - row), all_queries = GROUP * each;  // the last sequence may be cut off
  int last = offsets[row];  // the maximum, since padding has offset 0
  ROLL
  for (int i = 1; i < each; i++) last = max(last, offsets[row + i]);
  const int stop = min(last + 1, width * BLOCK);
#if PARTIAL
  const Spans span = spans(last, stop, EVERYTHING, 0, GROUPS_Z);
  const int begin = span.first + GROUP_Z * span.length, end = min(begin + span.length, stop);
  if (begin >= stop) return;  // the kernel that combines the splits does not read this one
#else
  const int begin = 0, end = stop;
#endif

  // The first keys are loaded while the queries are laid out. Keys after the last one are replaced by the last one,
  // because unwritten memory may hold NaN, and NaN times 0 is NaN. The 16 keys of a tile lie in one block.
  const size_t run = (size_t)kv_head * (keys_shape[0] / kv_heads);  // the head's lines in the pool
  GLOBAL const int* table = tables + (size_t)row * width;
  int tile = begin + WARP * TILE;
  size_t block = tile < end ? run + (size_t)table[tile / BLOCK] * BLOCK : run;
  uint4 key[2 * RUNS];
#define LINE(k) (block + min(k, end - 1) % BLOCK)
#define READ_KEYS()                                                                                            \
  UNROLL                                                                                                       \
  for (int u = 0; u < 2; u++) {                                                                                \
    UNROLL                                                                                                     \
    for (int j = 0; j < RUNS; j++) key[u * RUNS + j] = LOAD16(keys + LINE(tile + 8 * u + g) * D + j * 32 + t * 8); \
  }
  if (tile < end) {
    READ_KEYS()
  }

  // queries[32 * s + lane] is the operand `a` of a lane for step s of 16 numbers. Its column k = 2t is number
  // 32j + 8t for step 2j, and number 32j + 8t + 4 for step 2j + 1.
  SHARED(uint4, queries, STEPS * 32);
  SHARED(int, positions, QUERIES);
  if (THREAD < QUERIES) positions[THREAD] = from + THREAD < all_queries ? offsets[row + (from + THREAD) / GROUP] : 0;
#define QUERY(n) (((size_t)(row + (from + (n)) / GROUP) * heads + kv_head * GROUP + (from + (n)) % GROUP) * D)
  ROLL
  for (int i = THREAD; i < STEPS * 32; i += THREADS) {
    const int n = i % 32 / 4, number = i / 64 * 32 + i % 4 * 8 + i / 32 % 2 * 4;
    uint2 low = WORDS2(0, 0), high = WORDS2(0, 0);
    if (from + n < all_queries) low = LOAD8(q + QUERY(n) + number);
    if (from + n + 8 < all_queries) high = LOAD8(q + QUERY(n + 8) + number);
    queries[i] = WORDS4(low.x, high.x, low.y, high.y);
  }
  BARRIER();
  const int position = positions[g], position8 = positions[g + 8];

  float most = LOWEST, most8 = LOWEST, total = 0.0f, total8 = 0.0f;  // of queries g and g + 8
  float4 sum[8 * HALVES];
  UNROLL
  for (int i = 0; i < 8 * HALVES; i++) sum[i] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);

  ROLL
  while (tile < end) {
    uint4 value[4 * HALVES];
    UNROLL
    for (int u = 0; u < 4; u++) {
      UNROLL
      for (int h = 0; h < HALVES; h++)
        value[u * HALVES + h] = LOAD16(values + LINE(tile + 2 * t + u / 2 * 8 + u % 2) * D + h * 64 + g * 8);
    }
    const int seen = tile + 2 * t;
    tile += WARPS * TILE;
    if (tile < end) block = run + (size_t)table[tile / BLOCK] * BLOCK;

    float4 score[2];
    UNROLL
    for (int u = 0; u < 2; u++) {
      score[u] = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    UNROLL
    for (int j = 0; j < RUNS; j++) {
      const uint4 a = queries[2 * j * 32 + LANE], b = queries[(2 * j + 1) * 32 + LANE];
      UNROLL
      for (int u = 0; u < 2; u++) {
        mma(score[u], a, WORDS2(key[u * RUNS + j].x, key[u * RUNS + j].y), T());
        mma(score[u], b, WORDS2(key[u * RUNS + j].z, key[u * RUNS + j].w), T());
      }
    }
    if (tile < end) {
      READ_KEYS()
    }

    const float scale = FLOAT_BITS((uint)SCALE);  // the softmax has base 2
#define SEEN(x, k, p) x = (k) < end && (k) <= p ? x * scale : HIDDEN;
    UNROLL
    for (int u = 0; u < 2; u++) {
      const int k = seen + 8 * u;
      SEEN(score[u].x, k, position)
      SEEN(score[u].y, k + 1, position)
      SEEN(score[u].z, k, position8)
      SEEN(score[u].w, k + 1, position8)
    }
    // The four lanes with the same g have the scores of queries g and g + 8.
    float greatest = max(max(score[0].x, score[0].y), max(score[1].x, score[1].y));
    float greatest8 = max(max(score[0].z, score[0].w), max(score[1].z, score[1].w));
    UNROLL
    for (int mask = 1; mask < 4; mask *= 2) {
      greatest = max(greatest, SHUFFLE_XOR(greatest, mask));
      greatest8 = max(greatest8, SHUFFLE_XOR(greatest8, mask));
    }
    greatest = max(greatest, most), greatest8 = max(greatest8, most8);
    const float factor = EXP2(most - greatest), factor8 = EXP2(most8 - greatest8);
    most = greatest, most8 = greatest8;
    total *= factor, total8 *= factor8;
    UNROLL
    for (int i = 0; i < 8 * HALVES; i++) {
      sum[i].x *= factor, sum[i].y *= factor, sum[i].z *= factor8, sum[i].w *= factor8;
    }
    UNROLL
    for (int u = 0; u < 2; u++) {
      score[u].x = EXP2(score[u].x - most), score[u].y = EXP2(score[u].y - most);
      score[u].z = EXP2(score[u].z - most8), score[u].w = EXP2(score[u].w - most8);
      total += score[u].x + score[u].y, total8 += score[u].z + score[u].w;
    }
    // Weights of 16 bits alone would be less exact than those of the kernels for single rows. The rest of each weight
    // is a second operand.
    uint4 weight, rest;
    UNROLL
    for (int u = 0; u < 2; u++) {
      const uint low = packed(score[u].x, score[u].y, T()), high = packed(score[u].z, score[u].w, T());
      const float2 x = pair(low, T()), y = pair(high, T());
      const uint low_rest = packed(score[u].x - x.x, score[u].y - x.y, T());
      const uint high_rest = packed(score[u].z - y.x, score[u].w - y.y, T());
      if (u == 0) weight.x = low, weight.y = high, rest.x = low_rest, rest.y = high_rest;
      if (u == 1) weight.z = low, weight.w = high, rest.z = low_rest, rest.w = high_rest;
    }
    UNROLL
    for (int h = 0; h < HALVES; h++) {
#define PAIRS(i, word)                                                                                              \
  {                                                                                                                 \
    const uint a = value[h].word, b = value[HALVES + h].word;                                                       \
    const uint c = value[2 * HALVES + h].word, d = value[3 * HALVES + h].word;                                      \
    const uint2 even = WORDS2((a & 0xffffu) | (b << 16), (c & 0xffffu) | (d << 16));                                \
    const uint2 odd = WORDS2((a >> 16) | (b & 0xffff0000u), (c >> 16) | (d & 0xffff0000u));                         \
    mma(sum[8 * h + 2 * i], weight, even, T());                                                                     \
    mma(sum[8 * h + 2 * i], rest, even, T());                                                                       \
    mma(sum[8 * h + 2 * i + 1], weight, odd, T());                                                                  \
    mma(sum[8 * h + 2 * i + 1], rest, odd, T());                                                                    \
  }
      PAIRS(0, x)
      PAIRS(1, y)
      PAIRS(2, z)
      PAIRS(3, w)
    }
  }
  UNROLL
  for (int mask = 1; mask < 4; mask *= 2) {
    total += SHUFFLE_XOR(total, mask);
    total8 += SHUFFLE_XOR(total8, mask);
  }

  // A lane has 16 neighbouring numbers of each half of queries g and g + 8.
  SHARED(float4, sums, WARPS * QUERIES * D / 4);
  SHARED(float, states, WARPS * QUERIES * 2);
  UNROLL
  for (int h = 0; h < HALVES; h++) {
    UNROLL
    for (int i = 0; i < 4; i++) {
      const int one = 8 * h + i % 2 * 4, at = (h * 64 + t * 16) / 4 + i;
      const bool second = i / 2;  // the second of the lane's columns
#define COLUMN(v, low, high) (second ? sum[v].high : sum[v].low)
      sums[(WARP * QUERIES + g) * (D / 4) + at] =
          FLOAT4(COLUMN(one, x, y), COLUMN(one + 1, x, y), COLUMN(one + 2, x, y), COLUMN(one + 3, x, y));
      sums[(WARP * QUERIES + g + 8) * (D / 4) + at] =
          FLOAT4(COLUMN(one, z, w), COLUMN(one + 1, z, w), COLUMN(one + 2, z, w), COLUMN(one + 3, z, w));
    }
  }
  if (t == 0) {
    states[(WARP * QUERIES + g) * 2] = most, states[(WARP * QUERIES + g) * 2 + 1] = total;
    states[(WARP * QUERIES + g + 8) * 2] = most8, states[(WARP * QUERIES + g + 8) * 2 + 1] = total8;
  }
  BARRIER();
  ROLL
  for (int i = THREAD; i < QUERIES * D / 4; i += THREADS) {
    const int n = i / (D / 4), number = i % (D / 4) * 4;
    if (from + n >= all_queries) break;
    float greatest = LOWEST, all = 0.0f;
    float4 x = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    UNROLL
    for (int w = 0; w < WARPS; w++) greatest = max(greatest, states[(w * QUERIES + n) * 2]);
    UNROLL
    for (int w = 0; w < WARPS; w++) {
      const float factor = EXP2(states[(w * QUERIES + n) * 2] - greatest);
      const float4 part = sums[(w * QUERIES + n) * (D / 4) + number / 4];
      x.x += factor * part.x, x.y += factor * part.y, x.z += factor * part.z, x.w += factor * part.w;
      all += factor * states[(w * QUERIES + n) * 2 + 1];
    }
#if PARTIAL
    const size_t to = QUERY(n) / D * GROUPS_Z + GROUP_Z;
    auto into = part_sums + to * D + number;
    into[0] = x.x, into[1] = x.y, into[2] = x.z, into[3] = x.w;
    if (number == 0) part_states[2 * to] = greatest, part_states[2 * to + 1] = all;
#else
    auto into = out + QUERY(n) + number;
    const float share = 1.0f / all;
    into[0] = T(x.x * share), into[1] = T(x.y * share), into[2] = T(x.z * share), into[3] = T(x.w * share);
#endif
  }
"""


class GroupedAttention:
    """Attention over one layer's rows of the pool, where several adjacent rows belong to one sequence."""

    def __init__(self, make: Make, form: RowFormat, block_size: int, division: Division):
        """Make the kernels. Raise ValueError if they cannot read rows of this format."""
        if why := unreadable_groups(form, block_size):
            raise ValueError(why)
        self._form = form
        self._block_size = block_size
        self._division = division
        self._kernel = cache(
            lambda part: make(
                Source(
                    "grouped_attention" + "_part" * part,
                    ["q", "keys", "values", "tables", "offsets"],
                    ["part_sums", "part_states"] if part else ["out"],
                    _BODY,
                    SPANS + f"#define PARTIAL {int(part)}\n#define MOST_REGISTERS {REGISTERS[3]}\n",
                )
            )
        )
        self._combine = cache(lambda: combining_kernel(make))

    def __call__(
        self,
        queries: mx.array,
        pool: Sequence[mx.array],
        tables: mx.array,
        offsets: mx.array,
        scale: float,
        *,
        each: int,
        splits: int = 0,
        shape: Sequence[int] | None = None,
    ) -> mx.array:
        """Return attention [rows, 1, heads, dim]; a row's query is at its offset and sees no later position.

        Args:
            queries: [rows, heads, 1, dim].
            pool: The array of keys, then that of values; the new positions are in them already.
            tables: int32 [rows, width], the blocks of each row. Only those of a sequence's first row are read.
            offsets: int32 [rows], the position of each row. The rows of a sequence may be padded by rows with offset 0.
            scale: Factor of the scores.
            each: The number of adjacent rows that belong to one sequence. The last sequence may have fewer.
            splits: Splits of each sequence's keys; 0: as the division says.
            shape: The shape of the result if not [rows, 1, heads, dim]; the order in memory stays the same.
        """
        rows, heads, _, dim = queries.shape
        form, block = self._form, self._block_size
        group = heads // form.heads
        across, sequences = form.heads * -(-group * each // QUERIES), -(-rows // each)
        splits = splits or self._division.splits(sequences * across, tables.shape[1] * block)
        template: dict[str, Constant] = {
            "T": queries.dtype,
            "D": dim,
            "BLOCK": block,
            "GROUP": group,
            "EACH": each,
            "QUERIES": QUERIES,
            "WARPS": WARPS,
            "SCALE": bits_of(scale * math.log2(math.e)),
        }
        output = shape or (rows, 1, heads, dim), queries.dtype
        inputs, threads = [queries, *pool, tables, offsets], 32 * WARPS
        if splits == 1:
            (out,) = self._kernel(False)(inputs, template, (across, sequences, 1), threads, [output])
            return out
        # The splits follow from the largest offset of a sequence, so all of its rows are combined with that offset.
        whole = mx.pad(offsets, (0, sequences * each - rows)).reshape(sequences, each)
        ends = mx.repeat(whole.max(1), each)[:rows]
        groups, seen = (across, sequences, splits), [tables, ends]
        return in_splits(self._kernel(True), self._combine(), inputs, template, groups, threads, 1, seen, output)


def unreadable_groups(form: RowFormat, block_size: int) -> str:
    """Return why the kernel cannot read rows of this format; empty if it can."""
    if form.bits or form.dtype == mx.float32:
        return "cached numbers of other than 16 bits"
    if form.dim not in DIMS:
        return f"heads of {form.dim} numbers"
    return f"blocks of {block_size} positions" if block_size % 16 else ""
