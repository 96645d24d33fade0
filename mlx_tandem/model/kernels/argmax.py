"""Kernel for greedy sampling: the position of the largest logit of each row, with every logit read once.

A block of threads has one row. Numbers are compared by their bits, so that numbers that are not finite are found
without arithmetic on them. A thread keeps where the 16 bytes lie that hold its largest number, and only the last
thread looks inside them.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernels.dialect import Make, Source

THREADS = 512

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

_BODY = r"""
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
    """The kernel for one target."""

    def __init__(self, make: Make):
        self._kernel = make(Source("argmax", ["logits"], ["tokens"], ROW + _BODY, FUNCTIONS))

    def __call__(self, logits: mx.array) -> mx.array:
        """Return the position of the first largest logit of each row, int32 [rows], for logits [rows, vocabulary].

        It is NOT_A_NUMBER where the largest is not finite or any logit is NaN.
        """
        rows = logits.shape[0]
        (tokens,) = self._kernel([logits], {"T": logits.dtype}, (rows, 1, 1), THREADS, [((rows,), mx.int32)])
        return tokens
