"""Attention of a few queries per sequence, read straight from the blocks of the KV pool.

A block of threads has one row, one KV head, a few of the queries that share it, and one split of the row's keys; its
warps take tiles of keys in turns. The lanes of a warp form teams: a team has one key at a time, and each of its
lanes has 16 or 8 of the key's numbers. Every key and value is loaded once for all queries, and the next tile's keys are
loaded while this one's values are used. Each team keeps a softmax of its own, and all of them are combined at the
end. Where the rows alone do not fill the device, the keys of a row are split, and a second kernel combines the
splits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Shaped, Source, bits_of
from mlx_tandem.model.ops.attention.division import ALIGN, Division

MOST_QUERIES = 8
"""Most queries of a sequence in one step."""

WIDEST = 256
"""Most numbers of a head."""

MOST_WARPS = 4
"""Most warps of a block of threads, bounded by the memory that it shares in the body."""

EVERYTHING = 1 << 30
"""The window of queries that see all positions before them."""

# How keys are split, for the kernels that read them and the one that combines the splits.
SPANS = r"""
#define EVERYTHING (1 << 30)
DEVICE int first_seen(int offset, int window) { return max(0, offset + 1 - window) / 64 * 64; }
// The splits of the keys that a row's queries see: the first key, the keys of a split (the last may have fewer), and
// the number of splits. The row's table begins at position `begin`, and `stop` is the end of the keys.
struct Spans {
  int first, length, count;
};
DEVICE Spans spans(int offset, int stop, int window, int begin, int splits) {
  Spans s;
  s.first = max(begin, first_seen(offset, window));
  s.length = ((stop - s.first + splits - 1) / splits + 63) / 64 * 64;
  s.count = (stop - s.first + s.length - 1) / s.length;
  return s;
}
"""

# A lane's N numbers lie in runs of 16 bytes, and the runs of a team's lanes are neighbours.
_PLAIN = r"""
#define CODED 0
template <int WORDS> struct Part {
  uint w[WORDS];
};
template <class T, int D, int TEAM, int N>
DEVICE Part<N * (int)sizeof(T) / 4> read(GLOBAL const T* pool, size_t line, int member) {
  constexpr int RUN = 16 / (int)sizeof(T);
  Part<N * (int)sizeof(T) / 4> part;
  UNROLL
  for (int r = 0; r < N / RUN; r++) {
    const int number = (r * TEAM + member) * RUN;
    uint4 w = WORDS4(0, 0, 0, 0);
    if (D == N * TEAM || number < D) w = LOAD16(pool + line * D + number);
    part.w[4 * r] = w.x, part.w[4 * r + 1] = w.y, part.w[4 * r + 2] = w.z, part.w[4 * r + 3] = w.w;
  }
  return part;
}
template <class T, int WORDS> DEVICE float4 quarter(Part<WORDS> part, int i) {
#define NUMBER(n) FLOAT_BITS(part.w[4 * i + n])
  if (sizeof(T) == 4) return FLOAT4(NUMBER(0), NUMBER(1), NUMBER(2), NUMBER(3));
  const float2 a = pair(part.w[2 * i], T()), b = pair(part.w[2 * i + 1], T());
  return FLOAT4(a.x, a.y, b.x, b.y);
}
"""

# A lane's N numbers are one run of 16, 8 or 4 bytes of codes on one grid.
_CODED = r"""
#define CODED 1
template <int WORDS> struct Part {
  uint w[WORDS], grid;
};
template <int BITS, int D, int GRIDS, int TEAM, int N>
DEVICE Part<BITS * N / 32> read(GLOBAL const uint* codes, GLOBAL const uint* grids, size_t line, int member) {
  constexpr int WORDS = BITS * N / 32;
  Part<WORDS> part;
  uint4 w = WORDS4(0, 0, 0, 0);
  part.grid = 0;
  if (D == N * TEAM || member * N < D) {
    GLOBAL const uint* at = codes + line * (D * BITS / 32) + member * WORDS;
    const uint2 two = WORDS == 2 ? LOAD8(at) : WORDS2(at[0], 0);
    w = WORDS == 4 ? LOAD16(at) : WORDS4(two.x, two.y, 0, 0);
    part.grid = grids[line * GRIDS + member * N / (D / GRIDS)];
  }
  part.w[0] = w.x;
  if (WORDS > 1) part.w[WORDS > 1 ? 1 : 0] = w.y;
  if (WORDS == 4) part.w[WORDS / 4 * 2] = w.z, part.w[WORDS / 4 * 3] = w.w;
  return part;
}
DEVICE float4 on_grid(float a, float b, float c, float d, uint grid) {
  const float distance = FLOAT_BITS(grid & 0xffff0000u), lowest = FLOAT_BITS(grid << 16);
  return FLOAT4(a * distance + lowest, b * distance + lowest, c * distance + lowest, d * distance + lowest);
}
template <int BITS, int WORDS> DEVICE float4 quarter(Part<WORDS> part, int i) {
  if (BITS == 8) {
    const uint w = part.w[i];
    return on_grid(BYTE(w, 0), BYTE(w, 1), BYTE(w, 2), BYTE(w, 3), part.grid);
  }
  const uint w = part.w[i / 2] >> (i % 2 * 16), even = w & 0x0f0fu, odd = (w >> 4) & 0x0f0fu;
  return on_grid(BYTE(even, 0), BYTE(odd, 0), BYTE(even, 1), BYTE(odd, 1), part.grid);
}
"""

REGISTERS = {3: 168, 4: 128}
"""Most registers of a thread, by the number of blocks of four warps that a processor with 65,536 registers holds."""

_BODY = r"""
#if CODED
  constexpr int RUN = NUMBERS;
#define READ(half, at) read<BITS, D, GRIDS, TEAM, NUMBERS>(half##s, half##_grids, run + (at), member)
#define PART Part<BITS * NUMBERS / 32>
#define QUARTER(part, i) quarter<BITS>(part, i)
#else
  constexpr int RUN = 16 / (int)sizeof(T);
#define READ(half, at) read<T, D, TEAM, NUMBERS>(half##s, run + (at), member)
#define PART Part<NUMBERS * (int)sizeof(T) / 4>
#define QUARTER(part, i) quarter<T>(part, i)
#endif
  constexpr int PADDED = D <= 32 ? 32 : D <= 64 ? 64 : D <= 128 ? 128 : 256, QUARTERS = NUMBERS / 4;
  constexpr int TEAM = PADDED / NUMBERS, TEAMS = 32 / TEAM, TILE = TEAMS * DEPTH;
  constexpr bool IN_ONE_BLOCK = BLOCK % TILE == 0 && 64 % TILE == 0;  // a tile's keys: splits begin at multiples of 64
  constexpr float LOWEST = -1e30f, HIDDEN = -3e38f;  // a maximum of nothing, a score: infinities without being any
  const int member = LANE % TEAM, team = LANE / TEAM, warps = THREADS / 32;
  const int length = MANY ? q_shape[2] : 1, width = tables_shape[1];
  const int parts = (GROUP * length + QUERIES - 1) / QUERIES;
  const int kv_heads = GROUPS_X / parts, kv_head = GROUP_X / parts, row = GROUP_Y;
  const int from = GROUP_X % parts * QUERIES;  // of the head's queries, which lie by head, then by position
  const int offset = offsets[row], window = WINDOW;
  const int passed = WINDOWED ? max(0, offset + 1 - KEPT) / BLOCK : 0;  // blocks before the table's first
  const int reach = (passed + width) * BLOCK, stop = min(offset + length, reach);
#if PARTIAL
  const Spans span = spans(offset, stop, window, passed * BLOCK, GROUPS_Z);
  const int begin = span.first + GROUP_Z * span.length, end = min(begin + span.length, stop);
  if (begin >= stop) return;
#else
  const int begin = WINDOWED ? max(passed * BLOCK, first_seen(offset, window)) : 0, end = stop;
#endif

  // The first tile is on its way while the queries are laid out. A tile's blocks are looked up long before they are
  // needed; in the place of a key behind the last one stands the last one.
  const size_t run = (size_t)kv_head * (keys_shape[0] / kv_heads);  // the head's lines in the pool
  int tile = begin + WARP * TILE;
  int in_table[DEPTH];
  PART key[DEPTH];
#define KEY(t, u) min((t) + u * TEAMS + team, end - 1)
#define LOOK_UP(t)                                                                                      \
  UNROLL                                                                                                \
  for (int u = 0; u < DEPTH; u++)                                                                       \
    in_table[u] = tables[row * width + (IN_ONE_BLOCK ? min(t, reach - 1) : KEY(t, u)) / BLOCK - passed];
  LOOK_UP(tile)
  int at[DEPTH];
#define READ_KEYS(t)                                                                                    \
  UNROLL                                                                                                \
  for (int u = 0; u < DEPTH; u++) {                                                                     \
    at[u] = in_table[u] * BLOCK + KEY(t, u) % BLOCK;                                                     \
    key[u] = READ(key, at[u]);                                                                          \
  }
  if (tile < end) {
    READ_KEYS(tile)
  }

  // As a team reads them: [query][quarter of a lane's numbers][lane].
  SHARED(float4, queries, QUERIES * QUARTERS * TEAM);
  SHARED(int, positions, QUERIES);
  if (MANY && THREAD < QUERIES) positions[THREAD] = offset + (from + THREAD) % length;
  const size_t first = ((size_t)row * kv_heads + kv_head) * GROUP * length + from;
  ROLL
  for (int i = THREAD; i < QUERIES * QUARTERS * TEAM; i += THREADS) {
    const int lane = i % TEAM, j = i / TEAM % QUARTERS * 4, n = i / (QUARTERS * TEAM);
    const int number = (j / RUN * TEAM + lane) * RUN + j % RUN;
    float4 x = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    if (from + n < GROUP * length && number < D) {
      auto p = q + (first + n) * D + number;
      const float scale = FLOAT_BITS((uint)SCALE);
      x = FLOAT4(float(p[0]) * scale, float(p[1]) * scale, float(p[2]) * scale, float(p[3]) * scale);
    }
    queries[i] = x;
  }
  BARRIER();

  float most[QUERIES], total[QUERIES], sum[QUERIES * NUMBERS];
  UNROLL
  for (int n = 0; n < QUERIES; n++) {
    most[n] = LOWEST, total[n] = 0.0f;
  }
  UNROLL
  for (int i = 0; i < QUERIES * NUMBERS; i++) sum[i] = 0.0f;

  ROLL
  while (tile < end) {
    PART value[DEPTH];
    UNROLL
    for (int u = 0; u < DEPTH; u++) value[u] = READ(value, at[u]);
    const int seen = tile + team;
    tile += warps * TILE;
    LOOK_UP(tile)

    float score[QUERIES * DEPTH];
    UNROLL
    for (int i = 0; i < QUERIES * DEPTH; i++) score[i] = 0.0f;
    UNROLL
    for (int j = 0; j < QUARTERS; j++) {
      float4 x[DEPTH];
      UNROLL
      for (int u = 0; u < DEPTH; u++) x[u] = QUARTER(key[u], j);
      UNROLL
      for (int n = 0; n < QUERIES; n++) {
        const float4 y = queries[(n * QUARTERS + j) * TEAM + member];
        UNROLL
        for (int u = 0; u < DEPTH; u++)
          score[n * DEPTH + u] += x[u].x * y.x + x[u].y * y.y + x[u].z * y.z + x[u].w * y.w;
      }
    }
    if (tile < end) {
      READ_KEYS(tile)
    }

    UNROLL
    for (int mask = 1; mask < TEAM; mask *= 2) {
      UNROLL
      for (int i = 0; i < QUERIES * DEPTH; i++) score[i] += SHUFFLE_XOR(score[i], mask);
    }
    bool rises = false;
    float greatest[QUERIES];
    UNROLL
    for (int n = 0; n < QUERIES; n++) {
      greatest[n] = most[n];
      const int position = MANY ? positions[n] : offset;
      UNROLL
      for (int u = 0; u < DEPTH; u++) {
        const int k = seen + u * TEAMS;
        float s = score[n * DEPTH + u];
        if (CAP) s = FLOAT_BITS((uint)CAP) * TANH(s);
        s = k < end && k <= position && (!WINDOWED || k > position - window) ? s : HIDDEN;
        score[n * DEPTH + u] = s;
        greatest[n] = max(greatest[n], s);
      }
      rises = rises || greatest[n] > most[n] + 8.0f;
    }
    // Weights may be as large as 2^8 before everything so far is scaled down: it seldom is.
    if (rises) {
      UNROLL
      for (int n = 0; n < QUERIES; n++) {
        const float factor = EXP2(most[n] - greatest[n]);
        most[n] = greatest[n];
        total[n] *= factor;
        UNROLL
        for (int j = 0; j < NUMBERS; j++) sum[n * NUMBERS + j] *= factor;
      }
    }
    UNROLL
    for (int n = 0; n < QUERIES; n++) {
      UNROLL
      for (int u = 0; u < DEPTH; u++) {
        score[n * DEPTH + u] = EXP2(score[n * DEPTH + u] - most[n]);
        total[n] += score[n * DEPTH + u];
      }
    }
    UNROLL
    for (int j = 0; j < QUARTERS; j++) {
      UNROLL
      for (int u = 0; u < DEPTH; u++) {
        const float4 x = QUARTER(value[u], j);
        UNROLL
        for (int n = 0; n < QUERIES; n++) {
          const float weight = score[n * DEPTH + u];
          const int own = n * NUMBERS + 4 * j;
          sum[own] += weight * x.x, sum[own + 1] += weight * x.y;
          sum[own + 2] += weight * x.z, sum[own + 3] += weight * x.w;
        }
      }
    }
  }

  // Each team's sums are brought together through the memory of the block, as many queries at a time as fit there:
  // little code, since a block runs so short that to fetch its instructions is much of what it takes.
  constexpr int MOST_TEAMS = 4 * TEAMS, ROOM = SHARED_BYTES >= 40960 ? 4 : 2, AT_ONCE = QUERIES < ROOM ? QUERIES : ROOM;
  SHARED(float4, sums, MOST_TEAMS * AT_ONCE * PADDED / 4);
  SHARED(float, states, MOST_TEAMS * AT_ONCE * 2);
  const int mine = WARP * TEAMS + team, teams = warps * TEAMS;
  UNROLL
  for (int n0 = 0; n0 < QUERIES; n0 += AT_ONCE) {
    if (n0) BARRIER();
    UNROLL
    for (int c = 0; c < AT_ONCE; c++) {
      const int n = n0 + c;
      UNROLL
      for (int j = 0; j < NUMBERS; j += 4) {
        sums[((mine * AT_ONCE + c) * PADDED + (j / RUN * TEAM + member) * RUN + j % RUN) / 4] =
            FLOAT4(sum[n * NUMBERS + j], sum[n * NUMBERS + j + 1], sum[n * NUMBERS + j + 2], sum[n * NUMBERS + j + 3]);
      }
      if (member == 0) states[(mine * AT_ONCE + c) * 2] = most[n], states[(mine * AT_ONCE + c) * 2 + 1] = total[n];
    }
    BARRIER();
    ROLL
    for (int i = THREAD; i < AT_ONCE * D / 4; i += THREADS) {
      const int c = i / (D / 4), number = i % (D / 4) * 4, n = n0 + c;
      if (from + n >= GROUP * length) break;
      float greatest = LOWEST, all = 0.0f;
      float4 x = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
      ROLL
      for (int t = 0; t < teams; t++) greatest = max(greatest, states[(t * AT_ONCE + c) * 2]);
      const int head = kv_head * GROUP + (from + n) / length, heads = kv_heads * GROUP;
#if SINKS
      const float sink = float(sinks[head]) * 1.4426950408889634f;
      greatest = max(greatest, sink);
      all = EXP2(sink - greatest);
#endif
      ROLL
      for (int t = 0; t < teams; t++) {
        const float factor = EXP2(states[(t * AT_ONCE + c) * 2] - greatest);
        const float4 part = sums[((t * AT_ONCE + c) * PADDED + number) / 4];
        x.x += factor * part.x, x.y += factor * part.y, x.z += factor * part.z, x.w += factor * part.w;
        all += factor * states[(t * AT_ONCE + c) * 2 + 1];
      }
#if PARTIAL
      const size_t to = (first + n) * GROUPS_Z + GROUP_Z;
      auto into = part_sums + to * D + number;
      into[0] = x.x, into[1] = x.y, into[2] = x.z, into[3] = x.w;
      if (number == 0) part_states[2 * to] = greatest, part_states[2 * to + 1] = all;
#else
      auto into = out + (((size_t)row * length + (from + n) % length) * heads + head) * D + number;
      const float share = 1.0f / all;
      into[0] = T(x.x * share), into[1] = T(x.y * share), into[2] = T(x.z * share), into[3] = T(x.w * share);
#endif
    }
  }
"""

_TOGETHER = r"""
  // A block has one query of a row; its warps take splits in turns, their lanes four of the query's numbers at a time.
  constexpr int FOURS = (D + 127) / 128, DEPTH = 4;
  const int length = part_sums_shape[2], splits = part_sums_shape[3], heads = part_sums_shape[1];
  const int row = GROUP_Y, head = GROUP_X / length, query = GROUP_X % length, warps = THREADS / 32;
  const int offset = offsets[row], passed = WINDOWED ? max(0, offset + 1 - KEPT) / BLOCK : 0;
  const int stop = min(offset + length, (passed + tables_shape[1]) * BLOCK);
  const int count = spans(offset, stop, WINDOW, passed * BLOCK, splits).count;
  const size_t at = (((size_t)row * heads + head) * length + query) * splits;
  float greatest = -1e30f, all = 0.0f;
  for (int s = LANE; s < count; s += 32) greatest = max(greatest, part_states[2 * (at + s)]);
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) greatest = max(greatest, SHUFFLE_XOR(greatest, mask));
#if SINKS
  const float sink = float(sinks[head]) * 1.4426950408889634f;
  greatest = max(greatest, sink);
#endif
  for (int s = LANE; s < count; s += 32) {
    all += EXP2(part_states[2 * (at + s)] - greatest) * part_states[2 * (at + s) + 1];
  }
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) all += SHUFFLE_XOR(all, mask);
#if SINKS
  all += EXP2(sink - greatest);
#endif

  float x[4 * FOURS];
  UNROLL
  for (int i = 0; i < 4 * FOURS; i++) x[i] = 0.0f;
  for (int first = WARP; first < count; first += DEPTH * warps) {
    UNROLL
    for (int u = 0; u < DEPTH; u++) {
      const int s = first + u * warps;
      if (s < count) {
        const float factor = EXP2(part_states[2 * (at + s)] - greatest);
        UNROLL
        for (int f = 0; f < FOURS; f++) {
          const int number = f * 128 + LANE * 4;
          if (number < D) {
            const uint4 w = LOAD16(part_sums + (at + s) * D + number);
            x[4 * f] += factor * FLOAT_BITS(w.x), x[4 * f + 1] += factor * FLOAT_BITS(w.y);
            x[4 * f + 2] += factor * FLOAT_BITS(w.z), x[4 * f + 3] += factor * FLOAT_BITS(w.w);
          }
        }
      }
    }
  }
  SHARED(float, sums, 4 * FOURS * 128);
  UNROLL
  for (int i = 0; i < 4 * FOURS; i++) sums[(WARP * FOURS + i / 4) * 128 + LANE * 4 + i % 4] = x[i];
  BARRIER();
  for (int number = THREAD; number < D; number += THREADS) {
    float y = 0.0f;
    for (int w = 0; w < warps; w++) y += sums[w * FOURS * 128 + number];
    out[(((size_t)row * length + query) * heads + head) * D + number] = T(y / all);
  }
"""


class _Extras(NamedTuple):
    """The inputs that only some layers have. A layer without them has kernels of another form, because every array of a
    kernel costs the host time at each launch.
    """

    windowed: bool
    sinks: bool

    def inputs(self) -> list[str]:
        """Return the names of these inputs."""
        return [name for name, chosen in zip(("windows", "sinks"), self, strict=True) if chosen]

    def name(self) -> str:
        """Return the suffix of the names of kernels with these inputs."""
        return "".join(f"_{name}" for name in self.inputs())

    def defined(self) -> str:
        """Return the macros that tell a kernel's body which of these inputs exist."""
        window, kept = ("windows[0]", "windows[1]") if self.windowed else ("EVERYTHING", "EVERYTHING")
        choices = {"WINDOWED": int(self.windowed), "WINDOW": window, "KEPT": kept, "SINKS": int(self.sinks)}
        return "".join(f"#define {word} {meaning}\n" for word, meaning in choices.items())


_NO_EXTRAS = _Extras(windowed=False, sinks=False)


class PagedAttention:
    """Attention over one layer's rows of the pool, which have one format; `make` makes the kernels."""

    def __init__(self, make: Make, form: RowFormat, block_size: int, division: Division):
        """Make the kernels. Raise ValueError if they cannot read rows of this format."""
        if why := unreadable_rows(form):
            raise ValueError(why)
        self._form = form
        self._block_size = block_size
        self.division = division
        self._kernel = cache(
            lambda part, held, extras: _kernel(make, part=part, held=held, extras=extras, coded=bool(form.bits))
        )
        self._combine = cache(lambda extras: combining_kernel(make, extras))

    def __call__(
        self,
        queries: mx.array,
        pool: Sequence[mx.array],
        tables: mx.array,
        offsets: mx.array,
        scale: float,
        *,
        window: int = EVERYTHING,
        kept: int | None = None,
        sinks: mx.array | None = None,
        cap: float = 0.0,
        splits: int = 0,
        warps: int = 0,
        shape: Sequence[int] | None = None,
    ) -> mx.array:
        """Return attention [rows, length, heads, dim]; query i of a row is at position offset + i and sees no later
        position.

        Args:
            queries: [rows, heads, length, dim] with length at most MOST_QUERIES.
            pool: The arrays of keys, then of values; the new positions are in them already.
            tables: int32 [rows, width], the blocks of each row.
            offsets: int32 [rows], the position of each row's first query.
            scale: Factor of the scores.
            window: Positions that a query sees.
            kept: The window from whose start the tables begin, as in `StepView`.
            sinks: A logit for each head that takes weight from the keys, or None.
            cap: If not 0, scores become cap · tanh(score / cap).
            splits: Splits of each row's keys; 0: as the division says.
            warps: Warps of a block of threads; 0: MOST_WARPS.
            shape: The shape of the result if not [rows, length, heads, dim]; the order in memory stays the same.
        """
        form, block, division = self._form, self._block_size, self.division
        rows, heads, length, dim = queries.shape
        group = heads // form.heads
        together = division.together(group * length, dim)
        across = form.heads * -(-group * length // together)
        positions = min(tables.shape[1] * block, window + ALIGN)
        splits = splits or division.splits(rows * across, positions)
        warps = warps or MOST_WARPS
        window = min(window, kept or EVERYTHING)
        extras = _Extras(window < EVERYTHING, sinks is not None)
        windows = [integers(window, kept or EVERYTHING)] if extras.windowed else []
        weights = [] if sinks is None else [sinks]
        template: dict[str, Constant] = {
            "T": queries.dtype,
            "D": dim,
            "BLOCK": block,
            "GROUP": group,
            "QUERIES": together,
            "NUMBERS": division.numbers(together),
            "MANY": length > 1,
            "DEPTH": division.ahead(form, together, positions),
            "SCALE": bits_of(scale / cap if cap else scale * math.log2(math.e)),
            "CAP": bits_of(cap * math.log2(math.e)),
        }
        if form.bits:
            template |= {"BITS": form.bits, "GRIDS": form.groups}
        inputs = [queries, *pool, tables, offsets, *windows]
        output = shape or (rows, length, heads, dim), queries.dtype
        held = 0 if together > 4 else division.held(rows * across * splits)
        if splits == 1:
            kernel = self._kernel(False, held, extras)
            (out,) = kernel([*inputs, *weights], template, (across, rows, 1), 32 * warps, [output])
            return out
        part = self._kernel(True, held, extras._replace(sinks=False))
        seen = [tables, offsets, *windows, *weights]
        groups = across, rows, splits
        return in_splits(part, self._combine(extras), inputs, template, groups, 32 * warps, length, seen, output)


def _kernel(make: Make, *, part: bool, held: int, extras: _Extras, coded: bool) -> Kernel:
    """Return a kernel that answers queries, or computes a part of the answer to be combined with others.

    held: the number of blocks that a processor is to hold, as in REGISTERS; 0: as many as it can. coded: whether the
    pool holds numbers of a few bits.
    """
    name = "paged_attention" + "_part" * part + {0: "_many", 3: "", 4: "_dense"}[held] + extras.name()
    pool = ["keys", "key_grids", "values", "value_grids"] if coded else ["keys", "values"]
    outputs = ["part_sums", "part_states"] if part else ["out"]
    defined = f"#define PARTIAL {int(part)}\n" + extras.defined()
    if held:
        defined += f"#define MOST_REGISTERS {REGISTERS[held]}\n"
    functions = SPANS + (_CODED if coded else _PLAIN) + defined
    return make(Source(name, ["q", *pool, "tables", "offsets", *extras.inputs()], outputs, _BODY, functions))


def combining_kernel(make: Make, extras: _Extras = _NO_EXTRAS) -> Kernel:
    """Return the kernel that combines the answers of a row's splits."""
    inputs = ["part_sums", "part_states", "tables", "offsets", *extras.inputs()]
    name = "paged_attention_together" + extras.name()
    return make(Source(name, inputs, ["out"], _TOGETHER, SPANS + extras.defined()))


def in_splits(
    part: Kernel,
    combine: Kernel,
    inputs: Sequence[mx.array],
    template: Mapping[str, Constant],
    groups: tuple[int, int, int],
    threads: int,
    length: int,
    seen: Sequence[mx.array],
    output: Shaped,
) -> mx.array:
    """Return the answers of queries whose keys are cut into splits.

    Args:
        part: The kernel that answers from a split, with the `inputs` and `template` of a kernel that answers from all
            keys. Its first input is the queries [rows, heads, ...].
        combine: The `combining_kernel`.
        inputs: The inputs of `part`.
        template: The template of `part`.
        groups: The blocks of threads of `part`; the last number is that of the splits.
        threads: The threads of a block of `part`.
        length: The queries of a row.
        seen: The inputs of `combine` besides the parts: the tables, the offset of each row, and the layer's extras.
        output: The shape and type of the answers.
    """
    rows, heads = inputs[0].shape[:2]
    lines = (rows, heads, length, groups[2])
    shapes = [((*lines, inputs[0].shape[-1]), mx.float32), ((*lines, 2), mx.float32)]
    parts = part(inputs, template, groups, threads, shapes)
    own = {name: template[name] for name in ("T", "D", "BLOCK")}
    (out,) = combine([*parts, *seen], own, (heads * length, rows, 1), 128, [output])
    return out


def unreadable_rows(form: RowFormat) -> str:
    """Return why the kernels cannot read rows of this format; empty if they can."""
    if form.dim > WIDEST or form.dim % 16:
        return f"heads of {form.dim} numbers"
    if form.bits and form.dim // form.groups % 16:
        return f"{form.dim // form.groups} cached numbers on a grid"
    return ""


@lru_cache(maxsize=4096)
def integers(*values: int) -> mx.array:
    """Return the values as int32, padded with zeros to eight; made once, to be a constant of any graph.

    The array is evaluated and in the device's memory. For CUDA, MLX keeps an unevaluated constant and one of up to
    eight bytes in host memory, where one read takes longer than the rest of a short kernel. For Metal an input must
    have eight elements.
    """
    sent = mx.array(np.pad(np.array(values, np.int32), (0, 8 - len(values))))
    constant = sent + 0
    mx.eval(constant)  # while `sent` is alive, since otherwise its memory would be reused for `constant`
    return constant
