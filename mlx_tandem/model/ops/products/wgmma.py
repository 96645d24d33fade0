"""Kernels for the product of 33 to 80 rows by a linear's weights, by the instruction `wgmma` of NVIDIA's Hopper.

A block of threads has some outputs and one part of the inputs. It goes through the inputs in slices: while the tensor
cores multiply one slice, the next ones are on their way from device memory to shared memory, from where the instruction
reads both factors. All threads load. Each of the first GROUPS warpgroups multiplies the weights of 64 outputs by all
tokens. If the inputs are divided into several parts (split-K), the sums of the parts are added up in their order, by a
second kernel or by the kernel that reads the output (`residual.py`). So within one form the sum of a row does not
depend on how many other rows there are.

The kernels are for CUDA devices of compute capability 9.0 only.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source
from mlx_tandem.model.ops.products.skinny import eighths

_LINE_BYTES = 128
"""Bytes of a line of shared memory, which holds 64 inputs of an output or token, swizzled."""

_WARPGROUP = 128
"""Threads of a warpgroup, which issue the instruction together."""

_OUTPUTS = 64
"""Outputs of a warpgroup."""

_LOADING = 3
"""Fewest warpgroups of a block. Those without outputs only load."""

_ALIGNMENT = 1024
"""Alignment in bytes that the instruction requires of every eight lines."""

_ROOM = 227 << 10
"""Bytes of a block's shared memory on Hopper."""

_PROCESSORS = 132
"""Multiprocessors (SMs) of an H100 or H200. Each has one block at a time, because a block uses all of its memory."""

_EACH = 4
"""Adjacent outputs whose parts one thread of the second kernel adds up."""

_THREADS = 256
"""Threads of a block of the second kernel."""


class WideForm(NamedTuple):
    """A way to cut the work into blocks, parts and slices."""

    groups: int
    """Warpgroups that multiply; a block has 64 · groups outputs."""

    parts: int
    """Parts of the inputs."""

    tiles: int
    """Tiles of a slice, each of 64 inputs. With fewer, threads wait for one another more often."""

    stages: int
    """Slices in shared memory at once, two or more."""

    def room(self, eighths: int) -> int:
        """Return the bytes of shared memory for this many tokens, divided by eight."""
        return self.stages * self.tiles * _tile_bytes(self.groups, eighths) + _ALIGNMENT


def wide_form(eighths: int, outputs: int) -> WideForm | None:
    """Return the form for this many outputs and tokens, the latter divided by eight; None if the kernels are not for
    them.

    A block has the fewest warpgroups, at most three, for which no multiprocessor has two blocks. The inputs are divided
    into four, two or one part, as many as keep to that.
    """
    if not 4 < eighths <= 10 or outputs % _EACH:
        return None

    def blocks(groups: int) -> int:
        return -(-outputs // (_OUTPUTS * groups))

    groups = next((n for n in (1, 2) if blocks(n) <= _PROCESSORS), 3)
    parts = next((n for n in (4, 2) if n * blocks(groups) <= _PROCESSORS), 1)
    tiles = 4 if groups == 1 else 2
    return WideForm(groups, parts, tiles, (_ROOM - _ALIGNMENT) // (tiles * _tile_bytes(groups, eighths)))


class Product(NamedTuple):
    """The output of a linear."""

    y: mx.array
    parts: mx.array | None
    """Parts [parts, *y.shape], float32, of which y is the sum; None if y was not divided or has a bias."""


class Wgmma:
    """The kernels, for 16-bit types only."""

    def __init__(self, make: Make):
        self._product = cache(lambda biased, whole, tokens, room: _product(make, biased, whole, tokens, room))
        self._sum = cache(lambda biased: _sum(make, biased))

    def __call__(self, x: mx.array, weight: mx.array, bias: mx.array | None, form: WideForm) -> Product:
        """Return x @ weight.T + bias for x [..., inputs], weight [outputs, inputs] and bias [outputs].

        The arrays are contiguous and of one type; x has no more tokens than 8 · EIGHTHS[-1]; the number of outputs is a
        multiple of four.
        """
        outputs, inputs = weight.shape
        flat, shape = x.reshape(-1, inputs), (*x.shape[:-1], outputs)
        tokens, whole, biases = 8 * eighths(len(flat)), form.parts == 1, [] if bias is None else [bias]
        template: dict[str, Constant] = {"T": x.dtype, "TOKENS": tokens, "TILES": form.tiles, "STAGES": form.stages}
        template |= {"GROUPS": form.groups, "LOADING": max(form.groups, _LOADING), "PARTS": form.parts}
        (y,) = self._product(whole and bias is not None, whole, tokens, form.room(tokens // 8))(
            [flat, weight, *(biases if whole else [])],
            template,
            (-(-outputs // (_OUTPUTS * form.groups)), form.parts, 1),
            _WARPGROUP * max(form.groups, _LOADING),
            [(shape, x.dtype) if whole else ((form.parts, *shape), mx.float32)],
        )
        if whole:
            return Product(y, None)
        blocks = -(-len(flat) * outputs // (_EACH * _THREADS))
        inputs_of_sum, template = [y.reshape(form.parts, -1), *biases], {"T": x.dtype, "PARTS": form.parts}
        (total,) = self._sum(bias is not None)(inputs_of_sum, template, (blocks, 1, 1), _THREADS, [(shape, x.dtype)])
        return Product(total, y if bias is None else None)


def _tile_bytes(groups: int, eighths: int) -> int:
    """Return the bytes of a tile, which has a line of each output and token. `eighths`: tokens, divided by eight."""
    return _LINE_BYTES * (_OUTPUTS * groups + 8 * eighths)


def _product(make: Make, biased: bool, whole: bool, tokens: int, room: int) -> Kernel:
    name, inputs, bias = ("wgmma_biased", ["bias"], "float(bias[n])") if biased else ("wgmma", [], "0.0f")
    body = f"#define BIAS(n) {bias}\n#define WHOLE {int(whole)}\n" + _BODY
    return make(Source(name, ["x", "weight", *inputs], ["y"], body, _instructions(tokens) + _LOAD, room=room))


def _sum(make: Make, biased: bool) -> Kernel:
    name, inputs, bias = ("wgmma_sum", [], "0.0f")
    if biased:
        name, inputs, bias = ("wgmma_sum_biased", ["bias"], "float(bias[(at + i) % bias_shape[0]])")
    return make(Source(name, ["parts", *inputs], ["y"], f"#define BIAS(i) {bias}\n" + _SUM))


def _instructions(tokens: int) -> str:
    """Return the functions that issue instructions for this many tokens. Tests define their own (HAS_WGMMA)."""
    count = tokens // 2  # sums of a thread
    places = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    multiply = "".join(
        f"""
DEVICE void multiply(float (&d)[{count}], unsigned long long a, unsigned long long b, {kind}) {{
  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{tokens}k16"
    ".f32.{name}.{name} {{{places}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"
    : {sums} : "l"(a), "l"(b), "r"(1));
}}"""
        for kind, name in (("__nv_bfloat16", "bf16"), ("__half", "f16"))
    )
    return f"""
#ifndef HAS_WGMMA
// Return the matrix descriptor of lines with a swizzle of 128 bytes, the first of which is aligned to 1,024 bytes.
DEVICE unsigned long long descriptor(const uint4* lines) {{
  const uint address = (uint)__cvta_generic_to_shared(lines);
  return (unsigned long long)((address & 0x3ffff) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}}
// Multiply 16 inputs of the 64 lines of descriptor `a` by those of the lines of `b`, and add to `d`.{multiply}
DEVICE void fence_async_proxy() {{ asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }}
DEVICE void wgmma_fence() {{ asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }}
DEVICE void wgmma_commit() {{ asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }}
template <typename T>
DEVICE void wgmma_wait(float (&d)[{count}], T) {{
  asm volatile("wgmma.wait_group.sync.aligned 0;" : {sums} :: "memory");
}}
#endif
"""


_LOAD = """
// Start to copy TILES tiles from input k on, each with 64 inputs of every output and token. Inputs from `end` on are 0.
template <typename T, int OUTPUTS, int LINES, int TILES, int THREADS_>
DEVICE void load(uint4* to, const GLOBAL T* own, int outputs, const GLOBAL T* x, int tokens, int k, int end, int K,
                 int thread) {
  UNROLL for (int i = 0; i < LINES * 8; i += THREADS_) {
    const int each = i + thread, line = each / 8, column = each % 8;
    if (each < LINES * 8) {
      const GLOBAL T* from = line < OUTPUTS ? own + (size_t)min(line, outputs - 1) * K
                                            : x + (size_t)min(line - OUTPUTS, tokens - 1) * K;
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        const int at = k + 64 * tile + 8 * column;
        ASYNC16(to + (tile * LINES + line) * 8 + (column ^ (line % 8)), from + (at < end ? at : 0), at < end);
      }
    }
  }
}
"""

# GROUP_X is the index of the block's outputs, and GROUP_Y that of its part of the inputs.
_BODY = """
  constexpr int OUTPUTS = 64 * GROUPS, LINES = OUTPUTS + TOKENS, TILE = 8 * LINES, SLICE = TILES * TILE;
  constexpr int WIDTH = 64 * TILES, ALL = 128 * LOADING;
  ROOM(uint4, memory);
  uint4* room = (uint4*)(((unsigned long long)memory + 1023) / 1024 * 1024);
  const int K = weight_shape[1], N = weight_shape[0], M = x_shape[0];
  const int first = GROUP_X * OUTPUTS, group = SHUFFLE(THREAD / 128, 0);
  const int length = ((K + WIDTH - 1) / WIDTH + PARTS - 1) / PARTS * WIDTH;
  const int begin = GROUP_Y * length, end = min(K, begin + length), slices = (end - begin + WIDTH - 1) / WIDTH;
  const GLOBAL T* own = weight + (size_t)first * K;
#define LOAD(s, stage)                                                                                             \\
  if ((s) < slices)                                                                                                \\
    load<T, OUTPUTS, LINES, TILES, ALL>(room + (stage) * SLICE, own, N - first, x, M, begin + (s) * WIDTH, end, K, \\
                                        THREAD);                                                                   \\
  ASYNC_CLOSE();
  UNROLL for (int s = 0; s < STAGES - 1; s++) {
    LOAD(s, s)
  }
  float sums[TOKENS / 2];
  UNROLL for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0.0f;
  int stage = 0, free = STAGES - 1;
  for (int s = 0; s < slices; s++) {
    ASYNC_WAIT(STAGES - 2);
    fence_async_proxy();
    if (group < GROUPS) wgmma_wait(sums, T());
    BARRIER();  // all threads have loaded this slice, and all have multiplied the one before it
    if (group < GROUPS) {
      const unsigned long long a = descriptor(room + stage * SLICE + 64 * group * 8);
      const unsigned long long b = descriptor(room + stage * SLICE + OUTPUTS * 8);
      wgmma_fence();
      UNROLL for (int tile = 0; tile < TILES; tile++) {
        UNROLL for (int k = 0; k < 4; k++) multiply(sums, a + tile * TILE + 2 * k, b + tile * TILE + 2 * k, T());
      }
      wgmma_commit();
    }
    LOAD(s + STAGES - 1, free)
    free = stage;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  ASYNC_WAIT(0);
  if (group >= GROUPS) return;
  wgmma_wait(sums, T());
  // A thread has two neighbouring tokens of every eight, of outputs `output` and `output` + 8.
  const int output = first + 64 * group + 16 * (WARP % 4) + LANE / 4;
  UNROLL for (int i = 0; i < TOKENS / 8; i++) {
    UNROLL for (int j = 0; j < 4; j++) {
      const int m = 8 * i + 2 * (LANE % 4) + j % 2, n = output + j / 2 * 8;
      if (m < M && n < N) {
#if WHOLE
        y[(size_t)m * N + n] = T(sums[4 * i + j] + BIAS(n));
#else
        y[((size_t)GROUP_Y * M + m) * N + n] = sums[4 * i + j];
#endif
      }
    }
  }
"""

_SUM = """
  const size_t count = parts_shape[1], at = ((size_t)GROUP_X * THREADS + THREAD) * 4;
  if (at < count) {
    float4 sum = FLOAT4(BIAS(0), BIAS(1), BIAS(2), BIAS(3));
    UNROLL for (int part = 0; part < PARTS; part++) {
      const uint4 words = LOAD16(parts + part * count + at);
      sum.x += FLOAT_BITS(words.x);
      sum.y += FLOAT_BITS(words.y);
      sum.z += FLOAT_BITS(words.z);
      sum.w += FLOAT_BITS(words.w);
    }
    *(uint2*)(y + at) = WORDS2(packed(sum.x, sum.y, T()), packed(sum.z, sum.w, T()));
  }
"""
