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
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_tandem.model.cache.kvformat import RowFormat
from mlx_tandem.model.inputs import arange
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source, bits_of

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
#if JOINED
  auto from = product + (size_t)token * width + before;
#else
  auto from = (kind == 0 ? q : kind == 1 ? k : v) + (size_t)token * width + before;
#endif
  float low[EACH], high[EACH];  // numbers FIRST(p) and SECOND(p)
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const int p = LANE + 32 * j;
    low[j] = p < HALF ? float(from[FIRST(p)]) : 0.0f;
    high[j] = p < HALF ? float(from[SECOND(p)]) : 0.0f;
  }
  if (kind < 2) {
#if NORMED
    float squares = 0.0f;
    UNROLL
    for (int j = 0; j < EACH; j++) squares += low[j] * low[j] + high[j] * high[j];
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
    const float scale = RSQRT(squares / D + FLOAT_BITS((uint)EPSILON));
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < HALF) {  // rounded where MLX's own norm rounds
        const float a = float(weights[kind * D + FIRST(p)]), b = float(weights[kind * D + SECOND(p)]);
        low[j] = float(T(a * float(T(low[j] * scale))));
        high[j] = float(T(b * float(T(high[j] * scale))));
      }
    }
#endif
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const int p = LANE + 32 * j;
      if (p < TURNED) {
        const float c = angles[(size_t)token * TURNED + p], s = angles[(size_t)(tokens + token) * TURNED + p];
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
  const size_t into = (size_t)own * (keys_shape[0] / KV_HEADS) + slot;
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
        if (mine && LANE % 2 == 0) codes[into * (D / 2) + number / 2] = (unsigned char)(code | next << 4);
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
#if FETCHED
  auto out = (is_key ? new_keys : new_values) + (((size_t)row * KV_HEADS + own) * length + at) * D;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const int p = LANE + 32 * j;
    if (p < HALF) out[FIRST(p)] = T(low[j]), out[SECOND(p)] = T(high[j]);
  }
#endif
"""


class Norms(NamedTuple):
    """The RMS norms over each head of queries and of keys.

    weights: [2, dim], those of the queries' norm and of the keys'.
    """

    weights: mx.array
    epsilon: float


class _Variant(NamedTuple):
    """A form of the kernel. Each form has only the arrays that it needs, because every array of a kernel costs the host
    time at each launch.

    joined: whether one array holds the products of q, k and v.
    normed: whether the heads of queries and keys are normed.
    fetched: whether the new keys and values are outputs, too.
    """

    joined: bool
    normed: bool
    fetched: bool


class Rotary:
    """The kernel for layers whose rows have one format in the pool; `make` makes it."""

    def __init__(self, make: Make, form: RowFormat, block_size: int):
        self._form = form
        self._block_size = block_size
        self._kernel = cache(lambda variant: _kernel(make, variant, coded=bool(form.bits)))

    def __call__(
        self,
        parts: Sequence[mx.array],
        angles: mx.array,
        slots: mx.array,
        pool: Sequence[mx.array],
        *,
        norms: Norms | None,
        fetched: bool,
        gated: bool = False,
    ) -> list[mx.array]:
        """Return queries [rows, heads, length, dim], and if `fetched` the new keys and values as the pool holds
        them.

        Args:
            parts: The products of q, k and v, each [rows, length, heads or kv heads · dim] or [rows · length, …], or
                one array that holds all three side by side.
            angles: Cosines and sines, float32 [2, rows, length, rotated / 2]. The first `rotated` numbers of each head
                are rotated; if these are not all of them, `rotated` is a multiple of four.
            slots: int32 [rows, length], as in `StepView`.
            pool: The arrays of the layer's pool.
            norms: The norms of queries and keys; None: no norms.
            fetched: Whether to return new keys and values, each [rows, kv heads, length, dim].
            gated: Whether the product of q has a gate of `dim` numbers behind each head. The kernel skips the gates.
        """
        form, variant = self._form, _Variant(len(parts) == 1, norms is not None, fetched)
        rows, length = slots.shape
        dtype = parts[0].dtype
        heads = (parts[0].shape[-1] // form.dim - (2 * form.heads if variant.joined else 0)) // (2 if gated else 1)
        template: dict[str, Constant] = {
            "T": dtype,
            "D": form.dim,
            "HEADS": heads,
            "KV_HEADS": form.heads,
            "BLOCK": self._block_size,
            "ROTATED": 2 * angles.shape[-1],
            "GATED": gated,
        }
        if form.bits:
            template |= {"BITS": form.bits, "GRIDS": form.groups}
        weights: list[mx.array] = []
        if norms is not None:
            template["EPSILON"] = bits_of(norms.epsilon)
            weights = [norms.weights]
        lines = rows * length * (heads + 2 * form.heads)
        new = (rows, form.heads, length, form.dim), dtype
        return self._kernel(variant)(
            [*parts, angles, slots, *weights, *pool],
            template,
            (-(-lines // WARPS), 1, 1),
            32 * WARPS,
            [((rows, heads, length, form.dim), dtype), *([new, new] if fetched else [])],
        )


def _kernel(make: Make, form: _Variant, *, coded: bool) -> Kernel:
    """Return the kernel of this form, which writes numbers of a few bits if `coded`."""
    pool = ["keys", "key_grids", "values", "value_grids"] if coded else ["keys", "values"]
    name = "rotary" + "".join(f"_{word}" for word, chosen in form._asdict().items() if chosen)
    products = ["product"] if form.joined else ["q", "k", "v"]
    inputs = [*products, "angles", "slots", *(["weights"] if form.normed else []), *pool]
    outputs = ["queries", *(["new_keys", "new_values"] if form.fetched else [])]
    choices = {**form._asdict(), "coded": coded}
    defined = "".join(f"#define {word.upper()} {int(chosen)}\n" for word, chosen in choices.items())
    return make(Source(name, inputs, outputs, _BODY, _FUNCTIONS + defined, writes=pool))


# --- Rotary positions on a CPU ---------------------------------------------------------------------------------------

Angles = tuple[mx.array, mx.array]


class SharedAngles:
    """The cosines and sines of the forward that is being traced, for each kind of rope in the model."""

    def __init__(self, model: nn.Module):
        self._offset: mx.array | None = None
        self._made: dict[tuple[Any, ...], Angles] = {}
        for module in model.modules():
            if type(module) in (nn.RoPE, _SharedRope) and not module.traditional:
                rope: Any = module
                rope._angles = self
                rope.__class__ = _SharedRope

    def clear(self) -> None:
        """Drop the arrays of a forward that is over."""
        self._offset = None
        self._made.clear()

    def get(self, offset: mx.array, length: int, dims: int, base: float, scale: float) -> Angles:
        """Return cosines and sines [rows, 1, length, dims / 2] of the positions that begin at offset [rows]."""
        if self._offset is not offset:
            self.clear()
            self._offset = offset
        key = (length, dims, base, scale)
        if key not in self._made:
            half = dims // 2
            # The same float32 arithmetic as MLX's own, so that both agree to the last bits at long positions.
            frequency = mx.exp(mx.array(-np.arange(half, dtype=np.float32)) * (np.log(base).item() / half))
            position = (offset[:, None] + arange(length)).astype(mx.float32) * scale
            angle = position[:, None, :, None] * frequency
            self._made[key] = mx.cos(angle), mx.sin(angle)
        return self._made[key]


class _SharedRope(nn.RoPE):
    """A rope that takes its angles from SharedAngles."""

    _angles: SharedAngles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.ndim != 4:
            return super().__call__(x, offset)  # type: ignore[no-any-return]
        cos, sin = self._angles.get(offset, x.shape[2], self.dims, self.base, self.scale)
        half = self.dims // 2
        a, b = x[..., :half].astype(mx.float32), x[..., half : self.dims].astype(mx.float32)
        turned = [(a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)]
        rest = [x[..., self.dims :]] if self.dims < x.shape[-1] else []
        return mx.concatenate(turned + rest, axis=-1)
