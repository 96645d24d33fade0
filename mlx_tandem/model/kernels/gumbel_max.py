"""Kernel that draws tokens by temperature and by masks, with every logit read once.

A block of threads has one row. The sum of a token is its logit plus the temperature times its Gumbel noise, and the
token with the largest sum is drawn (`model/step/sampler.py` has the same noise in MLX's operations). The noise of a
token takes two logarithms. Most tokens do not need them: an upper bound of the noise that takes none shows that another
token of the warp has a larger sum. The kernel computes no noise for tokens that the mask excludes, and skips 16 bytes
of logits in which no token is allowed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.model.kernels.argmax import FUNCTIONS, ROW, Argmax
from mlx_tandem.model.kernels.dialect import Kernel, Make, Source

THREADS = 512


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

_LOOP = r"""
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
    """The kernels for one target, a `sampler.Pick`."""

    def __init__(self, make: Make):
        self._argmax = Argmax(make)
        self._kernel = cache(lambda masked: _kernel(make, masked=masked))

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


def _kernel(make: Make, *, masked: bool) -> Kernel:
    """Return the kernel that draws with noise, and with or without masks."""
    inputs = ["logits", *Noise._fields, *(Masks._fields if masked else ())]
    functions = FUNCTIONS + NUMBERS + DRAWING + (MASKED if masked else UNMASKED)
    body = START + (START_MASKED if masked else "") + _LOOP
    return make(Source("gumbel_max_masked" if masked else "gumbel_max", inputs, ["tokens"], body, functions))
