"""A fused path on CUDA through the layers of a transformer: one kernel adds a part's output and norms the sum.

Between the layers the sum belongs to one layer and the norm to the next. So a layer hands its normed sum to that norm,
which returns it when it is called with this very sum. A layer's own code is kept for devices and models without the
path. The known kinds of layers are those whose code was read: attention behind a norm, a sum, an MLP behind a norm, a
sum, and nothing else.

In a step with few tokens a row, neighbouring layers hand on arrays [tokens, dim] instead of [rows, length, dim]. For an
input with three axes, MLX adds a reshape before and after each product. A reshape costs a GPU nothing, but costs the
host as much as launching a small kernel (docs/decisions/gpu-steps.md).

The kernel computes the sum of two arrays and the RMS norm of that sum. A block of threads has one row, so a row's
results do not depend on other rows. The sum is rounded to its type before the norm reads it, and the normed numbers are
rounded before they are multiplied by the weight, as MLX's own operations do. For few rows both operations take longer
to start than to run, so one kernel takes half of their time.

The second array may be given as parts, which this kernel adds up. A kernel apart would take as long again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_moe, qwen3_next

from mlx_tandem.model import backend
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.checking import Rejected, checked, relative_error
from mlx_tandem.model.kernels.dialect import Constant, Kernel, Make, Source, bits_of
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.ops.all_sum import EXCHANGE, FUNCTIONS, MOST_ROWS, RowExchange, Sums
from mlx_tandem.model.ops.attention.block import FusedBlock
from mlx_tandem.model.ops.delta_net import FusedDeltaNet
from mlx_tandem.model.ops.products.few_rows import FewRows, find_few_rows

log = logging.getLogger(__name__)

# --- The kernel ------------------------------------------------------------------------------------------------------

EACH = 4
"""Neighbouring numbers of a row that a thread has at a time."""

MOST_THREADS = 1024
"""Most threads of a block."""

_FUNCTIONS = r"""
template <class T> struct alignas(4 * sizeof(T)) Four {
  T of[4];
};
"""

_ADDED = r"""
#if DIVIDED
    float4 y = FLOAT4(0.0f, 0.0f, 0.0f, 0.0f);
    UNROLL
    for (int part = 0; part < PARTS; part++) {
      const uint4 words = LOAD16(b + (size_t)part * GROUPS_X * D + at + from);
      y.x += FLOAT_BITS(words.x), y.y += FLOAT_BITS(words.y);
      y.z += FLOAT_BITS(words.z), y.w += FLOAT_BITS(words.w);
    }
    y0.x = float(T(y.x)), y0.y = float(T(y.y)), y1.x = float(T(y.z)), y1.y = float(T(y.w));
#else
    const uint2 y = LOAD8(b + at + from);
    y0 = pair(y.x, T()), y1 = pair(y.y, T());
#endif
"""
"""The numbers that are added to four numbers, as y0 and y1: four numbers of b, or the rounded sum of its parts."""

_SUMMED = "y0.x = mine[i].of[0], y0.y = mine[i].of[1], y1.x = mine[i].of[2], y1.y = mine[i].of[3];"
"""The same where the sum over ranks was made before."""

_GATHERED = (
    r"""
  Four<T> mine[RUNS];
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int from = min(4 * (i * WIDTH + THREAD), D - 4);
    float2 y0, y1;
"""
    + _ADDED
    + r"""
    mine[i].of[0] = T(y0.x), mine[i].of[1] = T(y0.y), mine[i].of[2] = T(y1.x), mine[i].of[3] = T(y1.y);
  }
"""
    + EXCHANGE
)
"""The numbers that are added to all numbers of a thread, summed over the ranks."""

_BODY = r"""
  constexpr int RUNS = (D + 4 * WIDTH - 1) / (4 * WIDTH);  // WIDTH is the number of threads
  const size_t at = (size_t)GROUP_X * D;
  @GATHERED@
  float own[4 * RUNS], squares = 0.0f;
  uint2 scale[RUNS];
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int number = 4 * (i * WIDTH + THREAD);
    const bool there = number < D;
    const int from = there ? number : 0;
    const uint2 x = LOAD8(a + at + from);
    scale[i] = LOAD8(weight + from);
    const float2 x0 = pair(x.x, T()), x1 = pair(x.y, T());
    float2 y0, y1;
    @ADDED@
    Four<T> both;
    both.of[0] = T(x0.x + y0.x), both.of[1] = T(x0.y + y0.y);
    both.of[2] = T(x1.x + y1.x), both.of[3] = T(x1.y + y1.y);
    if (there) *(GLOBAL Four<T>*)(sum + at + from) = both;
    UNROLL
    for (int j = 0; j < 4; j++) {
      own[4 * i + j] = there ? float(both.of[j]) : 0.0f;
      squares += own[4 * i + j] * own[4 * i + j];
    }
  }
  SHARED(float, sums, 32);
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  if (LANE == 0) sums[WARP] = squares;
  BARRIER();
  squares = LANE < WIDTH / 32 ? sums[LANE] : 0.0f;
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  const float norm = RSQRT(squares / D + FLOAT_BITS((uint)EPSILON));
  UNROLL
  for (int i = 0; i < RUNS; i++) {
    const int number = 4 * (i * WIDTH + THREAD);
    if (number >= D) break;
    const float2 w0 = pair(scale[i].x, T()), w1 = pair(scale[i].y, T());
    const float w[4] = {w0.x, w0.y, w1.x, w1.y};
    Four<T> made;
    UNROLL
    for (int j = 0; j < 4; j++) made.of[j] = T(w[j] * float(T(own[4 * i + j] * norm)));
    *(GLOBAL Four<T>*)(normed + at + number) = made;
  }
"""


class Norm(NamedTuple):
    """The weight [dim] and the epsilon of an RMS norm."""

    weight: mx.array
    epsilon: float


class AddNorm:
    """The kernel that adds two arrays and norms the sum; `make` makes it.

    With an exchange, the kernel of one rank: it adds the sum of all ranks' second arrays, and all ranks have to call it
    at the same point of their work.
    """

    def __init__(self, make: Make, exchange: RowExchange | None = None):
        self._exchange = exchange
        self._plain, self._divided = (_kernel(make, divided, exchange is not None) for divided in (False, True))

    def __call__(
        self, a: mx.array, b: mx.array, norm: Norm, shape: Sequence[int] | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return a + b and its norm for a and b [..., dim] of the weight's type.

        b may also be float32 parts [parts, *a.shape], which are added up and rounded first. The type has 16 bits, and
        `dim` is a multiple of EACH. shape: that of both results; None: the shape of a.
        """
        dim, shape = a.shape[-1], a.shape if shape is None else shape
        threads = min(MOST_THREADS, -(-dim // (32 * EACH)) * 32)
        divided = b.ndim > a.ndim
        assert b.dtype == (mx.float32 if divided else a.dtype) and b.size % a.size == 0
        template: dict[str, Constant] = {"T": a.dtype, "D": dim, "WIDTH": threads, "EPSILON": bits_of(norm.epsilon)}
        if divided:
            template["PARTS"] = b.shape[0]
        inputs = [a, b, norm.weight]
        if self._exchange is not None:
            template |= {"RANK": self._exchange.rank, "RANKS": self._exchange.ranks}
            inputs.append(self._exchange.where)
        total, normed = (self._divided if divided else self._plain)(
            inputs,
            template,
            (a.size // dim, 1, 1),
            threads,
            [(shape, a.dtype), (shape, a.dtype)],
        )
        return total, normed


def _kernel(make: Make, divided: bool, across: bool) -> Kernel:
    name = "add_norm" + "_parts" * divided + "_across" * across
    body = _BODY.replace("@GATHERED@", _GATHERED if across else "").replace("@ADDED@", _SUMMED if across else _ADDED)
    inputs, functions = ["a", "b", "weight", *["where"] * across], _FUNCTIONS + FUNCTIONS * across
    return make(Source(name, inputs, ["sum", "normed"], f"#define DIVIDED {int(divided)}\n" + body, functions))


# --- Its check -------------------------------------------------------------------------------------------------------

TOLERANCE = {mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
"""Largest difference by type: two steps of a number of the largest size."""

ROWS = 5


PARTS = (2, 4)
"""Numbers of parts of the second array in the check, which are those of `ops/products/wgmma.py`."""


def problem(kernel: AddNorm, norm: Norm, *, divided: bool = False) -> str:
    """Return why the kernel must not be used for norms of this kind; empty if it may.

    divided: whether the second array may be given in parts.
    """

    def check() -> str:
        error = largest_error(kernel, norm, divided=divided)
        if not error <= TOLERANCE[norm.weight.dtype]:
            raise Rejected(f"the kernel is wrong by {error:.1e} in {norm.weight.dtype}")
        return ""

    return checked("the kernel that adds and norms", check, lambda reason: reason)


def largest_error(kernel: AddNorm, norm: Norm, *, divided: bool = False) -> float:
    """Return the largest relative difference between the kernel's results and those of MLX's own operations."""
    rng = np.random.default_rng(0)
    dim, dtype = norm.weight.size, norm.weight.dtype
    a, *others = mx.array(rng.standard_normal((1 + max(PARTS), ROWS, 1, dim)).astype(np.float32))
    a, error = a.astype(dtype), 0.0
    for count in (0, *PARTS) if divided else (0,):
        parts = mx.stack(others[: count or 1])
        b = parts.sum(0).astype(dtype)
        got = kernel(a, parts if count else b, norm)
        want = a + b, mx.fast.rms_norm(a + b, norm.weight, norm.epsilon)
        error = max(error, *(relative_error(*each) for each in zip(got, want, strict=True)))
    return error


BY_KERNEL = "by one kernel with the norm"

TIMED_ROWS, TIMED_CALLS = 16, 32


def compared(across: Across, alone: AddNorm, norm: Norm, *, divided: bool) -> str:
    """Return how all ranks make sums that are added and normed, and why: BY_KERNEL …, or by MLX.

    Every rank has to call it. Ranks agree since each decides by what all of them found.

    Args:
        across: The kernel and the sums that it is compared with.
        alone: The kernel that adds and norms what MLX has summed.
        norm: The norm that follows.
        divided: Whether this rank's part may be given in parts.
    """
    group = across.sums.group

    def found() -> float:
        return largest_error_across(across, norm, divided=divided) / TOLERANCE[norm.weight.dtype]

    errors = [checked("the kernel that sums over ranks", found, lambda reason: float("inf"))]
    worst = _largest(errors, across.sums)[0]
    if not worst <= 1:
        return f"by MLX: the kernel is wrong by {worst:.1f} times what is allowed"
    rng = np.random.default_rng(1)
    a = mx.array(rng.standard_normal((TIMED_ROWS, norm.weight.size)).astype(np.float32)).astype(norm.weight.dtype)

    def chain(add: Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]) -> float:
        def run() -> None:
            total, normed = a, a
            for _ in range(TIMED_CALLS):
                total, normed = add(total, normed)
            mx.eval(normed)

        run()
        mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))  # all begin together
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) / TIMED_CALLS

    ours = chain(lambda x, y: across.kernel(x, y, norm))
    theirs = chain(lambda x, y: alone(x, mx.distributed.all_sum(y, group=group), norm))
    ours, theirs = _largest([ours, theirs], across.sums)
    figures = f"{ours * 1e6:.0f} µs for {TIMED_ROWS} rows, MLX takes {theirs * 1e6:.0f}"
    return f"{BY_KERNEL}: {figures}" if ours < theirs else f"by MLX: the kernel is slower: {figures}"


def _largest(own: Sequence[float], sums: Sums) -> list[float]:
    """Return the largest of each of these numbers over all ranks."""
    every = np.array(mx.distributed.all_max(mx.array([*own]), group=sums.group))
    return [float(each) for each in every]


def largest_error_across(across: Across, norm: Norm, *, divided: bool = False) -> float:
    """Return the largest relative difference between the kernel's results and those of MLX's sums, in this rank.

    Several sums follow one another, so that each of the places is used twice.
    """
    ranks, dim, dtype = across.exchange.ranks, norm.weight.size, norm.weight.dtype
    rng = np.random.default_rng(0)
    error = 0.0
    for rows in (1, ROWS, 1, MOST_ROWS):
        a, *all_parts = mx.array(rng.standard_normal((1 + ranks * max(PARTS), rows, dim)).astype(np.float32))
        a, parts = a.astype(dtype), mx.stack(all_parts).reshape(ranks, max(PARTS), rows, dim)
        for count in (0, *PARTS) if divided else (0,):
            each = [part[: count or 1] for part in parts]
            total = sum((own.sum(0).astype(dtype).astype(mx.float32) for own in each), mx.array(0.0)).astype(dtype)
            mine = each[across.exchange.rank]
            got = across.kernel(a, mine if count else mine[0].astype(dtype), norm)
            want = a + total, mx.fast.rms_norm(a + total, norm.weight, norm.epsilon)
            error = max(error, *(relative_error(*both) for both in zip(got, want, strict=True)))
    return error


# --- Its use ---------------------------------------------------------------------------------------------------------

MIXED = (qwen3_next.Qwen3NextDecoderLayer, qwen3_5.DecoderLayer)
"""The known layers of mlx-lm whose attention is `linear_attn` if they are linear."""

KINDS = (
    llama.TransformerBlock,
    qwen2.TransformerBlock,
    qwen3.TransformerBlock,
    qwen3_moe.Qwen3MoeDecoderLayer,
    *MIXED,
)
"""The known layers of mlx-lm."""


MOST_TOKENS = 512
"""Most tokens for which the kernel is used. It saves the host's time. With more tokens the host is not the limit, and
MLX's sum reuses the memory of an input, which the kernel cannot."""

BY_TOKENS = (FusedBlock, FusedDeltaNet)
"""Mixins of attention and gated delta nets that accept [tokens, dim] in steps where `takes_tokens` returns True."""


class Parts(NamedTuple):
    """The parts of a layer that the path needs. `following`: the norm behind the layer."""

    attention: nn.Module
    middle: Norm
    following: nn.Module


class Handed:
    """The sum that a layer handed to a norm, with its normed numbers.

    Attributes:
        lead: (rows, length) of the step, which cannot be read from the shape of a sum [tokens, dim].
    """

    def __init__(self) -> None:
        self.lead = (0, 0)
        self._sum: mx.array | None = None
        self._normed: mx.array | None = None

    def put(self, total: mx.array, normed: mx.array, lead: tuple[int, int]) -> None:
        """Keep a sum and its norm."""
        self._sum, self._normed, self.lead = total, normed, lead

    def take(self, x: mx.array) -> mx.array | None:
        """Forget what was handed; return the normed numbers if x is the sum."""
        total, normed, self._sum, self._normed = self._sum, self._normed, None, None
        return normed if total is x else None


def install(model: nn.Module) -> None:
    """Let the model's layers of known kinds take the path if this device can run it and its results are right."""
    here = backend.current().kernels
    if here.target is None or not here.joins_operations:
        return
    layers = fusable(model)
    if not layers:
        return
    kernel, few = AddNorm(dialect.maker(here.target)), find_few_rows(model)
    if why := problem(kernel, layers[0][1].middle, divided=few is not None and few.divides):
        log.warning("sums and norms run apart: %s", why)
    else:
        use(layers, kernel)
        log.info("sums and norms of %d layers run as one", len(layers))


def fusable(model: nn.Module) -> list[tuple[nn.Module, Parts]]:
    """Return the model's layers that can take the path, each with the parts that it needs."""
    found = []
    for layers, last in _stacks(model):
        for layer, after in pairwise([*layers, None]):
            following: Any = last if after is None else after.input_layernorm if type(after) in KINDS else None
            if type(layer) in KINDS and _is_plain(layer.post_attention_layernorm) and _is_plain(following):
                attention = layer.linear_attn if type(layer) in MIXED and layer.is_linear else layer.self_attn
                found.append((layer, Parts(attention, _norm(layer.post_attention_layernorm), following)))
    return found


def use(layers: Sequence[tuple[nn.Module, Parts]], kernel: AddNorm) -> None:
    """Let these layers take the path from here on."""
    norms = {id(layer.input_layernorm) for layer, parts in layers if isinstance(parts.attention, BY_TOKENS)}
    for layer, parts in layers:
        own: Any = layer
        own._parts, own._add_norm, own._few_rows = parts, kernel, find_few_rows(layer)
        own._across = None
        own._hands_tokens = id(parts.following) in norms
        mix_in(layer, FusedLayer)
        following: Any = parts.following
        following._handed = Handed()
        mix_in(following, HandedNorm)


def _stacks(model: nn.Module) -> Iterator[tuple[list[Any], Any]]:
    """Yield the layers of each stack of layers in the model, with the norm behind the last."""
    for module in model.modules():
        layers = module.get("layers")
        if isinstance(layers, list) and layers:
            yield layers, module.get("norm")


def _is_plain(norm: Any) -> bool:
    """Return whether a module is an RMS norm of mlx.nn that the kernel can compute."""
    return type(norm) is nn.RMSNorm and norm.weight.dtype in (mx.bfloat16, mx.float16) and not norm.weight.size % EACH


def _norm(norm: Any) -> Norm:
    return Norm(norm.weight, float(norm.eps))


class Across(NamedTuple):
    """The sums over ranks that a model's linears return, and the kernel that makes, adds and norms them."""

    sums: Sums
    exchange: RowExchange
    kernel: AddNorm

    def part(self, total: mx.array) -> mx.array | None:
        """Return this rank's part of the newest sum if it is `total` and the kernel takes it."""
        return self.sums.take_part(total) if self.exchange.takes(total) else None


def join(model: nn.Module, sums: Sums) -> str:
    """Let layers on the path add up over the ranks by the kernel if it is right and faster than MLX on all ranks.

    Every rank has to call it. Return how sums are made and why.
    """
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, FusedLayer)]
    here = backend.current().kernels
    if not layers or here.target is None:
        return "by MLX: this model or device has no kernel that norms sums"
    exchange = RowExchange.open(sums.group)
    if exchange is None:
        return "by MLX: the ranks share no memory"
    across = Across(sums, exchange, AddNorm(dialect.maker(here.target), exchange))
    reason = compared(across, layers[0]._add_norm, layers[0]._parts.middle, divided=layers[0]._few_rows is not None)
    if reason.startswith(BY_KERNEL):
        for layer in layers:
            layer._across = across
    return reason


class FusedLayer:
    """Mixin of a layer that takes the path."""

    _parts: Parts
    _add_norm: AddNorm
    _few_rows: FewRows | None
    """The kernels of the layer's linears, which may return an output as parts."""

    _across: Across | None
    """How sums over ranks are added and normed; None: by `mx.distributed`, or there is one rank."""

    _hands_tokens: bool
    """Whether the next layer's attention can accept [tokens, dim], so that this layer may return that shape."""

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Return the layer's output for x [rows, length, dim], or for x [tokens, dim] from the layer before."""
        layer: Any = self
        attention, middle, following = self._parts
        norm: Any = layer.input_layernorm
        lead = (x.shape[0], x.shape[1]) if x.ndim == 3 else norm._handed.lead
        if x.ndim == 3 and isinstance(attention, BY_TOKENS) and attention.takes_tokens(x, lead[1], mask, cache):
            x = x.reshape(-1, x.shape[-1])
        total, normed = self._added(x, self._attended(norm(x), lead, mask, cache), middle, x.shape)
        shape = x.shape if self._hands_tokens else (*lead, x.shape[-1])
        total, normed = self._added(total, layer.mlp(normed), _norm(following), shape)
        handed: Any = following
        handed._handed.put(total, normed, lead)
        return total

    def _attended(self, x: mx.array, lead: tuple[int, int], mask: mx.array | None, cache: Any) -> mx.array:
        """Return the attention's output for x, in the shape of x.

        If the attention does not accept [tokens, dim], x is reshaped to three axes for the call.
        """
        attention: Any = self._parts.attention
        if x.ndim == 3 or attention.takes_tokens(x, lead[1], mask, cache):
            attended: mx.array = attention(x, mask, cache)
            return attended
        apart: mx.array = attention(x.reshape(*lead, -1), mask, cache)
        return apart.reshape(x.shape)

    def _added(self, a: mx.array, b: mx.array, norm: Norm, shape: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Return a + b and its norm, both reshaped to `shape`. The kernel is for few tokens of the weight's type."""
        few = a.size <= MOST_TOKENS * a.shape[-1]
        if few and a.dtype == b.dtype == norm.weight.dtype and a.shape == b.shape:
            kernel = self._add_norm
            if self._across is not None and (own := self._across.part(b)) is not None:
                kernel, b = self._across.kernel, own
            parts = None if self._few_rows is None else self._few_rows.take_parts(b)
            return kernel(a, b if parts is None else parts, norm, shape)
        total = (a + b).reshape(shape)
        return total, mx.fast.rms_norm(total, norm.weight, norm.epsilon)


class HandedNorm:
    """Mixin of a norm whose input comes from a layer that has normed it already."""

    _handed: Handed

    def __call__(self, x: mx.array) -> mx.array:
        """Return the norm of x: what was handed with x, or its own result."""
        normed = self._handed.take(x)
        return super().__call__(x) if normed is None else normed  # type: ignore[misc]
