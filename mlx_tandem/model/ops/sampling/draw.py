"""Kernels that draw tokens: greedily, by temperature and masks, and among the likeliest.

A block of threads has one row. Numbers are compared by their bits, so that numbers that are not finite are found
without arithmetic on them.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source

# --- The likeliest token ---------------------------------------------------------------------------------------------

THREADS = 512
"""Threads of a block."""

FUNCTIONS = (
    rf"""
#define NOT_A_NUMBER ({NOT_A_NUMBER})
#define ENDLESS 0xff000000u
"""
    + r"""
// In the order of numbers, both zeros the same: 0 for -infinity, ENDLESS for infinity, above it NaN of either sign.
DEVICE uint height(float x) {
  const uint word = WORD_BITS(x);
  return (int)word < 0 ? 0xff800000u - word : word + 0x7f800000u;
}
template <class T> DEVICE uint highest(uint word, T) {
  const float2 both = pair(word, T());
  return max(height(both.x), height(both.y));
}
DEVICE uint highest(uint word, float) { return height(FLOAT_BITS(word)); }
struct Peak {
  uint height;
  int at;
};
DEVICE Peak higher(Peak a, Peak b) {
  return b.height > a.height || (b.height == a.height && b.at < a.at) ? b : a;
}
DEVICE Peak of_warp(Peak peak, int LANE) {
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) {
    Peak other;
    other.height = SHUFFLE_XOR(peak.height, mask);
    other.at = SHUFFLE_XOR(peak.at, mask);
    peak = higher(peak, other);
  }
  return peak;
}
// Replaces `peak` by the highest peak of the block. Warps other than the first leave the kernel here.
// `peaks` is shared memory for 32 peaks.
#define REDUCE_OR_LEAVE(peak, peaks)                   \
  peak = of_warp(peak, LANE);                          \
  if (LANE == 0) peaks[WARP] = peak;                   \
  BARRIER();                                           \
  if (WARP > 0) return;                                \
  if (LANE < THREADS / 32) peak = peaks[LANE];         \
  peak = of_warp(peak, LANE);
// NOT_A_NUMBER where the largest number is not finite.
#define FINITE(peak, token) (peak.height > 0u && peak.height < ENDLESS ? (token) : NOT_A_NUMBER)
"""
)
"""Peaks: the largest number so far, by its height, and where it is. The kernels that draw at random use them, too."""

ROW = r"""
  constexpr int EACH = 16 / (int)sizeof(T);
  const int width = logits_shape[1];
  const size_t begin = (size_t)GROUP_X * width;
  GLOBAL const T* row = logits + begin;
  // Words of 16 bytes are aligned as the array's first number is, and a row may begin and end within one.
  const int head = min(width, (EACH - (int)((uint)begin % EACH)) % EACH), words = (width - head) / EACH;
  Peak peak;
  peak.height = 0u, peak.at = 0;
"""
"""The block's row, its words of 16 bytes, and its peak so far."""

_ARGMAX = r"""
  constexpr int DEPTH = 4;
  for (int word = THREAD; word < words; word += DEPTH * THREADS) {
    uint4 read[DEPTH];  // the last word again where there are no more, which changes nothing
    UNROLL
    for (int i = 0; i < DEPTH; i++) read[i] = LOAD16(row + head + EACH * min(word + i * THREADS, words - 1));
    UNROLL
    for (int i = 0; i < DEPTH; i++) {
      const uint a = max(highest(read[i].x, T()), highest(read[i].y, T()));
      const uint b = max(highest(read[i].z, T()), highest(read[i].w, T()));
      if (max(a, b) > peak.height) peak.height = max(a, b), peak.at = head + EACH * min(word + i * THREADS, words - 1);
    }
  }
  if (THREAD < width - EACH * words) {  // before the words and behind them
    Peak one;
    one.at = THREAD < head ? THREAD : THREAD + EACH * words;
    one.height = height(float(row[one.at]));
    peak = higher(peak, one);
  }
  SHARED(Peak, peaks, 32);
  REDUCE_OR_LEAVE(peak, peaks)
  if (LANE > 0) return;
  int token = peak.at;
  UNROLL
  for (int i = EACH - 1; i >= 0; i--) {
    if (peak.at + i < width && height(float(row[peak.at + i])) == peak.height) token = peak.at + i;
  }
  tokens[GROUP_X] = FINITE(peak, token);
"""


class Argmax:
    """The kernel for greedy sampling for one target, which reads every logit once.

    A thread keeps where the 16 bytes lie that hold its largest number, and only the last thread looks inside them.
    """

    def __init__(self, make: Make):
        self._kernel = make(Source("argmax", ["logits"], ["tokens"], ROW + _ARGMAX, FUNCTIONS))

    def __call__(self, logits: mx.array) -> mx.array:
        """Return the position of the first largest logit of each row, int32 [rows], for logits [rows, vocabulary].

        It is NOT_A_NUMBER where the largest is not finite or any logit is NaN.
        """
        rows = logits.shape[0]
        (tokens,) = self._kernel([logits], {"T": logits.dtype}, (rows, 1, 1), THREADS, [((rows,), mx.int32)])
        return tokens


# --- Draws by temperature and masks ----------------------------------------------------------------------------------


class Noise(NamedTuple):
    """The inputs of the rows' Gumbel noise.

    key: [rows, 2] uint32; position: [rows] int32, the positions of the tokens to be drawn; temperature: [rows, 1]
    float32, 0 where the likeliest token is to be drawn.
    """

    key: mx.array
    position: mx.array
    temperature: mx.array


class Masks(NamedTuple):
    """The tokens that rows may draw.

    places: [at least rows] int32; the first `rows` are the indices of the rows' masks in the table, and the others are
    ignored; table: [masks, words] uint32, a bit for each token.
    """

    places: mx.array
    table: mx.array

    def of_rows(self, rows: int) -> mx.array:
        """Return the masks of all rows, [rows, words] uint32, for MLX's operations."""
        # The places may lie in the host's memory, and MLX's gather reads them for each word, so they are copied first.
        return self.table[self.places[:rows] + 0]


NUMBERS = r"""
// The i-th of the numbers in 16 bytes, for a constant i.
template <class T> DEVICE float number(uint4 read, int i, T) {
  const int at = i / 2;
  const float2 both = pair(at == 0 ? read.x : at == 1 ? read.y : at == 2 ? read.z : read.w, T());
  return i % 2 ? both.y : both.x;
}
DEVICE float number(uint4 read, int i, float) {
  return FLOAT_BITS(i == 0 ? read.x : i == 1 ? read.y : i == 2 ? read.z : read.w);
}
"""
"""Access to the numbers of a row."""

DRAWING = r"""
// MurmurHash3's finaliser.
DEVICE uint hashed(uint h) {
  h = (h ^ (h >> 16)) * 0x85ebca6bu;
  h = (h ^ (h >> 13)) * 0xc2b2ae35u;
  return h ^ (h >> 16);
}
// From 2^-33 to 1.
DEVICE float unit(uint token, uint first, uint second) {
  const uint bits = hashed(hashed(token * 0x9e3779b1u ^ first) + second);
  return float(bits) * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
}
// An upper bound of -log2(u), at most 0.09 too high, since log2(1 + m) >= m for m from 0 to 1.
// Gumbel noise is at most -ln(u).
DEVICE float bound(float u) { return 127.00002f - float((int)WORD_BITS(u)) * 1.1920929e-7f; }
DEVICE float gumbel(float u) {
  const float series = u * (1.0f + u * (0.5f + u / 3.0f));
  const float exponential = u < 1e-3f ? series : -0.69314718f * LOG2(max(1.0f - u, 1e-30f));
  return -0.69314718f * LOG2(exponential);
}
// Takes the sum of a token, whose logit is x, into the thread's peak.
#define CONSIDER(x, token)                                                       \
  {                                                                              \
    const float u = unit(token, first, second);                                  \
    if (height(x + 0.6931473f * temperature[GROUP_X] * bound(u)) >= reached) {   \
      const uint sum = height(x + temperature[GROUP_X] * gumbel(u));             \
      if (sum > peak.height || (sum == peak.height && token < peak.at)) {        \
        peak.height = sum, peak.at = token;                                      \
      }                                                                          \
      reached = max(reached, sum);                                             \
    }                                                                            \
  }
"""

START = (
    ROW
    + r"""
  constexpr int DEPTH = 2;
  uint reached = 0u;  // a height that some sum of this warp has
  const uint hashed_position = (uint)position[GROUP_X] * 0x9e3779b9u;
  const uint first = hashed(key[2 * GROUP_X] ^ hashed(hashed_position + 0x7f4a7c15u));
  const uint second = hashed(key[2 * GROUP_X + 1] + hashed(hashed_position ^ 0x94d049bbu));
"""
)

START_MASKED = r"""
  const int last = table_shape[1] - 1;
  GLOBAL const uint* mask = table + (size_t)places[GROUP_X] * table_shape[1];
"""

_GUMBEL_MAX = r"""
  for (int from = 32 * WARP; from < words; from += DEPTH * THREADS) {  // the same for all lanes, which take part below
    uint4 read[DEPTH];  // the last word again where there are no more, which changes nothing
    uint allowed[DEPTH];
    UNROLL
    for (int i = 0; i < DEPTH; i++) {
      const int token = head + EACH * min(from + LANE + i * THREADS, words - 1);
      read[i] = LOAD16(row + token);
      allowed[i] = ALLOWED(token);
    }
    UNROLL
    for (int i = 0; i < DEPTH; i++) {
      const int token = head + EACH * min(from + LANE + i * THREADS, words - 1);
      if ((allowed[i] & ((1u << EACH) - 1u)) == 0u) continue;
      UNROLL
      for (int e = 0; e < EACH; e++) {
        if (allowed[i] >> e & 1u) CONSIDER(number(read[i], e, T()), (token + e))
      }
    }
    UNROLL
    for (int lanes = 1; lanes < 32; lanes *= 2) reached = max(reached, SHUFFLE_XOR(reached, lanes));
  }
  if (THREAD < width - EACH * words) {  // before the words and behind them
    const int token = THREAD < head ? THREAD : THREAD + EACH * words;
    if (ALLOWED(token) & 1u) CONSIDER(float(row[token]), token)
  }
  SHARED(Peak, peaks, 32);
  REDUCE_OR_LEAVE(peak, peaks)
  if (LANE == 0) tokens[GROUP_X] = FINITE(peak, peak.at);
"""

# ALLOWED(token): bit i says whether token + i is allowed, for i below EACH.
MASKED = r"""
#define ALLOWED(token) (mask[(token) >> 5] >> ((token) & 31) | \
                        ((token) & 31 ? mask[min(((token) >> 5) + 1, last)] << (32 - ((token) & 31)) : 0u))
"""

UNMASKED = r"""
#define ALLOWED(token) 0xffffffffu
"""


@lru_cache(maxsize=64)
def _no_noise(rows: int) -> Noise:
    """Return noise with temperature 0, for greedy rows with masks; cached as constants of graphs."""
    zeros = np.zeros((rows, 2), np.uint32), np.zeros(rows, np.int32), np.zeros((rows, 1), np.float32)
    return Noise(*(mx.array(each) for each in zeros))


class GumbelMax:
    """The kernels for one target that draw by temperature and by masks, a `sampler.Pick`. They read every logit once.

    The sum of a token is its logit plus the temperature times its Gumbel noise, and the token with the largest sum is
    drawn (`sampler.py` has the same noise in MLX's operations). The noise of a token takes two logarithms. Most tokens
    do not need them: an upper bound of the noise that takes none shows that another token of the warp has a larger sum.
    A kernel computes no noise for tokens that the mask excludes, and skips 16 bytes of logits in which no token is
    allowed.
    """

    def __init__(self, make: Make):
        self._argmax = Argmax(make)
        self._kernel = cache(lambda masked: _gumbel_max(make, masked=masked))

    def __call__(self, logits: mx.array, noise: Noise | None, masks: Masks | None) -> mx.array:
        """Return the tokens that are drawn from logits [rows, vocabulary], int32 [rows]."""
        if noise is None and masks is None:
            return self._argmax(logits)
        rows = logits.shape[0]
        if noise is None:
            noise = _no_noise(rows)
        inputs = [logits, *noise, *(masks or ())]
        kernel = self._kernel(masks is not None)
        (tokens,) = kernel(inputs, {"T": logits.dtype}, (rows, 1, 1), THREADS, [((rows,), mx.int32)])
        return tokens


def _gumbel_max(make: Make, *, masked: bool) -> Kernel:
    """Return the kernel that draws with noise, and with or without masks."""
    inputs = ["logits", *Noise._fields, *(Masks._fields if masked else ())]
    functions = FUNCTIONS + NUMBERS + DRAWING + (MASKED if masked else UNMASKED)
    body = START + (START_MASKED if masked else "") + _GUMBEL_MAX
    return make(Source("gumbel_max_masked" if masked else "gumbel_max", inputs, ["tokens"], body, functions))


# --- Draws among the likeliest tokens --------------------------------------------------------------------------------


class Limits(NamedTuple):
    """The truncations of rows, [rows, 1] each.

    top_p: float32, 1 where off; top_k: int32, at least the size of the vocabulary where off; min_p: float32, 0 where
    off.
    """

    top_p: mx.array
    top_k: mx.array
    min_p: mx.array


_TRUNCATED = r"""
DEVICE float of_height(uint h) { return FLOAT_BITS(h < 0x7f800000u ? 0xff800000u - h : h - 0x7f800000u); }
DEVICE uint warp_sum(uint x, int LANE) {
  UNROLL
  for (int lanes = 1; lanes < 32; lanes *= 2) x += SHUFFLE_XOR(x, lanes);
  return x;
}
DEVICE float warp_sum(float x, int LANE) {
  UNROLL
  for (int lanes = 1; lanes < 32; lanes *= 2) x += SHUFFLE_XOR(x, lanes);
  return x;
}
// Runs the given statement for each token of the row that its mask allows, with its logit `x`.
#define OVER_ROW(...)                                                                      \
  for (int from = THREAD; from < words; from += DEPTH * THREADS) {                         \
    uint4 read[DEPTH];                                                                     \
    uint allowed[DEPTH];                                                                   \
    UNROLL                                                                                 \
    for (int i = 0; i < DEPTH; i++) {                                                      \
      const int at = head + EACH * min(from + i * THREADS, words - 1);                     \
      read[i] = LOAD16(row + at);                                                          \
      allowed[i] = from + i * THREADS < words ? ALLOWED(at) : 0u;                          \
    }                                                                                      \
    UNROLL                                                                                 \
    for (int i = 0; i < DEPTH; i++) {                                                      \
      UNROLL                                                                               \
      for (int e = 0; e < EACH; e++) {                                                     \
        const int token = head + EACH * (from + i * THREADS) + e;                          \
        const float x = number(read[i], e, T());                                           \
        if (allowed[i] >> e & 1u) __VA_ARGS__                                                   \
      }                                                                                    \
    }                                                                                      \
  }                                                                                        \
  if (THREAD < width - EACH * words) {                                                     \
    const int token = THREAD < head ? THREAD : THREAD + EACH * words;                      \
    const float x = float(row[token]);                                                     \
    if (ALLOWED(token) & 1u) __VA_ARGS__                                                        \
  }
// Adds up `sum` of all threads, for all threads.
#define TOTAL(sum, sums)                                              \
  sum = warp_sum(sum, LANE);                                          \
  if (LANE == 0) sums[WARP] = sum;                                    \
  BARRIER();                                                          \
  sum = sums[0];                                                      \
  for (int w = 1; w < THREADS / 32; w++) sum += sums[w];              \
  BARRIER();
// Finds the highest peak of all threads, for all threads.
#define HIGHEST(peak, peaks)                                          \
  peak = of_warp(peak, LANE);                                         \
  if (LANE == 0) peaks[WARP] = peak;                                  \
  BARRIER();                                                          \
  peak = peaks[0];                                                    \
  for (int w = 1; w < THREADS / 32; w++) peak = higher(peak, peaks[w]); \
  BARRIER();
#define PROBABILITY(x) EXP2((x - greatest) * steepness)
"""

_TRUNCATED_DRAW = r"""
  SHARED(Peak, peaks, 32);
  SHARED(uint, counts, 32 * 7);
  SHARED(float, masses, 32);
  const float heat = temperature[GROUP_X];
  OVER_ROW({
    const uint h = height(x);
    if (h > peak.height || (h == peak.height && token < peak.at)) peak.height = h, peak.at = token;
  })
  HIGHEST(peak, peaks)
  if (peak.height == 0u || peak.height >= ENDLESS || heat == 0.0f) {
    if (THREAD == 0) tokens[GROUP_X] = FINITE(peak, peak.at);
    return;
  }
  const float greatest = of_height(peak.height), steepness = 1.4426950408889634f / heat;
  uint cut = 1u;  // the height from which on tokens are kept
  if (min_p[GROUP_X] > 0.0f) cut = max(cut, height(greatest + heat * 0.69314718f * LOG2(min_p[GROUP_X])));
  const int most_tokens = top_k[GROUP_X];
  if (most_tokens < width) {
    uint kth = 0u;  // a height that so many tokens reach
    for (int bit = 29; bit > LAST_BIT - 3; bit -= 3) {
      const int shift = max(bit, 0), steps = bit < 0 ? 3 : 7;  // 32 bits are no multiple of three
      uint reach[7];
      UNROLL
      for (int s = 0; s < 7; s++) reach[s] = 0u;
      OVER_ROW({
        const uint h = height(x);
        UNROLL
        for (int s = 0; s < 7; s++) reach[s] += h >= kth + ((uint)(s + 1) << shift) ? 1u : 0u;
      })
      UNROLL
      for (int s = 0; s < 7; s++) {
        const uint own = warp_sum(reach[s], LANE);
        if (LANE == 0) counts[7 * WARP + s] = own;
      }
      BARRIER();
      int step = 0;
      for (int s = 0; s < steps; s++) {
        uint all = 0u;
        for (int w = 0; w < THREADS / 32; w++) all += counts[7 * w + s];
        if (all >= (uint)most_tokens) step = s + 1;
      }
      kth += (uint)step << shift;
      BARRIER();
    }
    cut = max(cut, kth);
  }
  const bool shares = top_p[GROUP_X] < 1.0f;
  float share = 0.0f;
  if (shares) {
    OVER_ROW({ share += height(x) >= cut ? PROBABILITY(x) : 0.0f; })
    TOTAL(share, masses)
    share *= top_p[GROUP_X];
  }
  // The likeliest token is always kept, so the largest sum is at least its own.
  const uint likeliest = height(greatest + heat * gumbel(unit(peak.at, first, second)));
  while (true) {
    peak.height = 0u, peak.at = 0;
    uint reached = likeliest;
    OVER_ROW({ if (height(x) >= cut) CONSIDER(x, token) })
    HIGHEST(peak, peaks)
    if (!shares) break;
    const uint drawn = height(float(row[peak.at]));
    if (drawn < cut) break;  // this cannot be, and the loop would not end
    float likelier = 0.0f;
    OVER_ROW({ likelier += height(x) > drawn ? PROBABILITY(x) : 0.0f; })
    TOTAL(likelier, masses)
    if (likelier < share || drawn == height(greatest)) break;
    cut = drawn + 1u;
  }
  if (THREAD == 0) tokens[GROUP_X] = peak.at;
"""

_LAST_BITS = {mx.bfloat16: 16, mx.float16: 13, mx.float32: 0}
"""The lowest bit in which the heights of two numbers of a type can differ."""


class TruncatedDraw:
    """The kernel for one target that draws among the likeliest tokens, a `sampler.PickTruncated`.

    It reads a row several times, mostly from the device's cache. Everything that min-p, top-k and top-p keep is the
    upper part of the tokens in the order of their logits, so each of them is a cut:

    1. The largest logit, to which probabilities are relative, and the cut of min-p follow from one pass.
    2. The cut of top-k is the k-th largest logit. It is found three bits at a time: a pass counts how many logits reach
       each of seven numbers.
    3. For top-p, a pass adds up what the other truncations keep.
    4. A token is drawn from what is kept. With top-p, a pass adds up the tokens that are likelier. If they alone hold
       the share, the drawn token and all less likely ones are left out, and another token is drawn from the rest. That
       is exact, since the token with the largest sum of logit and noise is the same in any set that contains it.
    """

    def __init__(self, make: Make):
        self._kernel = cache(lambda masked: _truncated_draw(make, masked=masked))

    def __call__(self, logits: mx.array, noise: Noise, limits: Limits, masks: Masks | None) -> mx.array:
        """Return the tokens that are drawn from logits [rows, vocabulary], int32 [rows]."""
        rows = logits.shape[0]
        template: dict[str, Constant] = {"T": logits.dtype, "LAST_BIT": _LAST_BITS[logits.dtype]}
        inputs = [logits, *noise, *limits, *(masks or ())]
        (tokens,) = self._kernel(masks is not None)(inputs, template, (rows, 1, 1), THREADS, [((rows,), mx.int32)])
        return tokens


def _truncated_draw(make: Make, *, masked: bool) -> Kernel:
    """Return the kernel with or without masks."""
    inputs = ["logits", *Noise._fields, *Limits._fields, *(Masks._fields if masked else ())]
    functions = FUNCTIONS + NUMBERS + DRAWING + _TRUNCATED + (MASKED if masked else UNMASKED)
    body = START + (START_MASKED if masked else "") + _TRUNCATED_DRAW
    return make(Source("truncated_draw_masked" if masked else "truncated_draw", inputs, ["tokens"], body, functions))
