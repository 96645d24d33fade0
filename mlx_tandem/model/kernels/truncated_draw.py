"""Kernel that draws tokens by temperature among the likeliest ones: min-p, top-k and top-p, with masks.

A block of threads has one row and reads it several times, mostly from the device's cache. Everything that these
truncations keep is the upper part of the tokens in the order of their logits, so each of them is a cut:

1. The largest logit, to which probabilities are relative, and the cut of min-p follow from one pass.
2. The cut of top-k is the k-th largest logit. It is found three bits at a time: a pass counts how many logits reach
   each of seven numbers.
3. For top-p, a pass adds up what the other truncations keep.
4. A token is drawn from what is kept. With top-p, a pass adds up the tokens that are likelier. If they alone hold the
   share, the drawn token and all less likely ones are left out, and another token is drawn from the rest. That is
   exact, since the token with the largest sum of logit and noise is the same in any set that contains it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.argmax import FUNCTIONS
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source
from mlx_tandem.model.kernels.gumbel_max import DRAWING, MASKED, NUMBERS, START, START_MASKED, UNMASKED, Masks, Noise

THREADS = 512


class Limits(NamedTuple):
    """The truncations of rows, [rows, 1] each.

    top_p: float32, 1 where off; top_k: int32, at least the size of the vocabulary where off; min_p: float32, 0 where
    off.
    """

    top_p: mx.array
    top_k: mx.array
    min_p: mx.array


_FUNCTIONS = r"""
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

_BODY = r"""
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
    """The kernel for one target, a `sampler.PickTruncated`."""

    def __init__(self, make: Make):
        self._kernel = cache(lambda masked: _kernel(make, masked=masked))

    def __call__(self, logits: mx.array, noise: Noise, limits: Limits, masks: Masks | None) -> mx.array:
        """Return the tokens that are drawn from logits [rows, vocabulary], int32 [rows]."""
        rows = logits.shape[0]
        template: dict[str, Constant] = {"T": logits.dtype, "LAST_BIT": _LAST_BITS[logits.dtype]}
        inputs = [logits, *noise, *limits, *(masks or ())]
        (tokens,) = self._kernel(masks is not None)(inputs, template, (rows, 1, 1), THREADS, [((rows,), mx.int32)])
        return tokens


def _kernel(make: Make, *, masked: bool) -> Kernel:
    """Return the kernel with or without masks."""
    inputs = ["logits", *Noise._fields, *Limits._fields, *(Masks._fields if masked else ())]
    functions = FUNCTIONS + NUMBERS + DRAWING + _FUNCTIONS + (MASKED if masked else UNMASKED)
    body = START + (START_MASKED if masked else "") + _BODY
    return make(Source("truncated_draw_masked" if masked else "truncated_draw", inputs, ["tokens"], body, functions))
