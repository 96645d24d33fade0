"""A fused path on a GPU through layers of Qwen3.5's kind, which compute the gated delta rule.

One kernel computes the inputs of the rule from the layer's products, the rule's kernel follows, and one kernel computes
the norm behind it. A layer's own code is kept and runs whenever the fused path cannot: for rows that begin, for long
chunks of prompts, and to verify drafts.

Before the rule, a layer convolves its products with those of the tokens before, applies SiLU, gives queries and keys
unit length, and computes decay and strength. MLX's own operations need some twenty kernels for that, most of which take
longer to start than to run. `DeltaNetInputs` does it in one kernel, which reads the last products of each row from a
line of the pool and writes the new ones to a line of the pool. `GatedNorm` is the norm behind the rule. Both kernels
round numbers where mlx-lm's operations round them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import qwen3_5
from mlx_lm.models.cache import ArraysCache

from mlx_tandem.model import backend
from mlx_tandem.model.cache.states import PoolLines, StateArray, StateCache, StateShape, StateView
from mlx_tandem.model.kernels import checking, dialect, inplace
from mlx_tandem.model.kernels.checking import Rejected, Verdict, checked, relative_error
from mlx_tandem.model.kernels.dialect import Constant, Make, Source, bits_of
from mlx_tandem.model.modules import mix_in, unmix
from mlx_tandem.model.ops import gated_delta
from mlx_tandem.model.ops.gated_delta import TOLERANCE, GatedDelta, RuleInputs
from mlx_tandem.model.ops.products.merged import Merged, home_of

log = logging.getLogger(__name__)

# --- The kernels -----------------------------------------------------------------------------------------------------

WARPS = 4
"""Warps in a block of threads."""

_FUNCTIONS = r"""
DEVICE float exponential(float x) { return EXP2(x * 1.44269504f); }
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }
"""

_INPUTS = r"""
  constexpr int EACH = DIM / 32, LINES = 2 * HK + HV, CHANNELS = LINES * DIM;
  const int line = GROUP_X * (THREADS / 32) + WARP, row = GROUP_Y, length = qkv_shape[0] / GROUPS_Y;
  if (line > LINES) return;
  if (line == LINES) {  // one warp computes decay and strength of all heads
    for (int i = LANE; i < length * HV; i += 32) {
      const int head = i % HV;
      const size_t token = (size_t)row * length + i / HV;
      const float x = float(T(float(a[token * A_WIDTH + A_AT + head]) + float(dt_bias[head])));
      const float from_zero = x < 0.0f ? x : -x;
      const float softplus = float(T(max(x, 0.0f) + LOG2(1.0f + exponential(from_zero)) * 0.69314718f));
      decay[token * HV + head] = exponential(-exponential(float(a_log[head])) * softplus);
      strength[token * HV + head] = T(sigmoid(float(b[token * B_WIDTH + B_AT + head])));
    }
    return;
  }
  // A warp has the DIM channels of one head, and a lane every 32nd of them.
  const int first = line * DIM + LANE;
  const size_t width = (size_t)(TAPS - 1) * CHANNELS;  // the width of a line of the pool
  float past[TAPS - 1][EACH], taps[TAPS][EACH];
  UNROLL
  for (int j = 0; j < EACH; j++) {
    UNROLL
    for (int i = 0; i < TAPS - 1; i++) past[i][j] = float(pool[read[row] * width + i * CHANNELS + first + 32 * j]);
    UNROLL
    for (int i = 0; i < TAPS; i++) taps[i][j] = float(weight[(first + 32 * j) * TAPS + i]);
  }
  const int kind = line < HK ? 0 : line < 2 * HK ? 1 : 2;
  const int head = line - kind * HK, heads = kind == 2 ? HV : HK;
  auto to = kind == 0 ? q : kind == 1 ? k : v;
  for (int t = 0; t < length; t++) {
    const size_t token = (size_t)row * length + t;
    float x[EACH], squares = 0.0f;
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const float now = float(qkv[token * QKV_WIDTH + QKV_AT + first + 32 * j]);
      float sum = past[0][j] * taps[0][j];
      UNROLL
      for (int i = 1; i < TAPS - 1; i++) sum += past[i][j] * taps[i][j];
      sum += now * taps[TAPS - 1][j];
      UNROLL
      for (int i = 0; i < TAPS - 2; i++) past[i][j] = past[i + 1][j];
      past[TAPS - 2][j] = now;
      const float y = float(T(sum));
      x[j] = float(T(y * float(T(sigmoid(y)))));
      squares += x[j] * x[j];
    }
    if (kind < 2) {
      UNROLL
      for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
      const float norm = RSQRT(squares / DIM + 1e-6f / DIM);
      const float scale = float(T(kind == 0 ? 1.0f / DIM : RSQRT((float)DIM)));
      UNROLL
      for (int j = 0; j < EACH; j++) x[j] = float(T(float(T(x[j] * norm)) * scale));
    }
    UNROLL
    for (int j = 0; j < EACH; j++) to[(token * heads + head) * DIM + LANE + 32 * j] = T(x[j]);
  }
  auto kept = (GLOBAL T*)pool + write[row] * width;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    UNROLL
    for (int i = 0; i < TAPS - 1; i++) kept[i * CHANNELS + first + 32 * j] = T(past[i][j]);
  }
"""

_NORM = r"""
  constexpr int EACH = DIM / 32;
  const int line = GROUP_X * (THREADS / 32) + WARP;  // a head of a token
  if (line >= y_shape[0] * y_shape[1] * HV) return;
  const size_t token = line / HV;
  const int head = line % HV;
  float x[EACH], squares = 0.0f;
  UNROLL
  for (int j = 0; j < EACH; j++) {
    x[j] = float(y[(size_t)line * DIM + LANE + 32 * j]);
    squares += x[j] * x[j];
  }
  UNROLL
  for (int mask = 1; mask < 32; mask *= 2) squares += SHUFFLE_XOR(squares, mask);
  const float norm = RSQRT(squares / DIM + FLOAT_BITS((uint)EPSILON));
  UNROLL
  for (int j = 0; j < EACH; j++) {
    const float gate = float(z[token * Z_WIDTH + Z_AT + head * DIM + LANE + 32 * j]);
    const float own = float(T(float(weight[LANE + 32 * j]) * float(T(x[j] * norm))));
    out[(size_t)line * DIM + LANE + 32 * j] = T(gate * sigmoid(gate) * own);
  }
"""


class Product(NamedTuple):
    """The output of a linear, which may be a part of a wider array.

    whole: the array [rows, length, width] or [rows · length, width]; at: the first column of the part.
    """

    whole: mx.array
    at: int = 0

    def template(self, name: str) -> dict[str, Constant]:
        """Return the constants with which a kernel finds the part."""
        return {f"{name}_AT": self.at, f"{name}_WIDTH": self.whole.shape[-1]}


class Mixer(NamedTuple):
    """The weights and dimensions of a layer that the kernels need.

    weight: the weight [channels, taps, 1] of the convolution; a_log, dt_bias: [heads], the weights of the decay; norm,
    epsilon: the weight [dim] and the epsilon of the norm behind the rule; key_heads: the number of heads of keys, and
    of queries; heads: the number of heads of values; dim: the width of every head.
    """

    weight: mx.array
    a_log: mx.array
    dt_bias: mx.array
    norm: mx.array
    epsilon: float
    key_heads: int
    heads: int
    dim: int


class DeltaNetInputs:
    """The kernel that computes the inputs of the gated delta rule from a layer's products; `make` makes it."""

    def __init__(self, make: Make):
        names = ["qkv", "a", "b", "weight", "a_log", "dt_bias", "pool", "read", "write"]
        outputs = ["q", "k", "v", "decay", "strength"]
        self._kernel = make(Source("delta_net_inputs", names, outputs, _INPUTS, _FUNCTIONS, writes=["pool"]))

    def __call__(
        self,
        mixer: Mixer,
        products: tuple[Product, Product, Product],
        pool: mx.array,
        read: mx.array,
        write: mx.array,
    ) -> RuleInputs:
        """Write the last products into the pool, and return the inputs of the rule, which depend on this write.

        Args:
            mixer: The layer.
            products: The products of queries, keys and values side by side, of the decay, and of the strength.
            pool: [lines, (taps - 1) · channels], the last inputs of the convolution of each row, the oldest first.
            read: int32 [rows], the line of each row before the step.
            write: int32 [rows], the line of each row after the step. No line that is written belongs to another row.
        """
        qkv, a, b = products
        dtype, rows = qkv.whole.dtype, read.shape[0]
        length = qkv.whole.size // qkv.whole.shape[-1] // rows
        template: dict[str, Constant] = {
            "T": dtype,
            "HK": mixer.key_heads,
            "HV": mixer.heads,
            "DIM": mixer.dim,
            "TAPS": mixer.weight.shape[1],
            **qkv.template("QKV"),
            **a.template("A"),
            **b.template("B"),
        }
        lines = 2 * mixer.key_heads + mixer.heads + 1
        keys, values = (rows, length, mixer.key_heads, mixer.dim), (rows, length, mixer.heads, mixer.dim)
        gates = (rows, length, mixer.heads)
        flat = [product.whole.reshape(-1, product.whole.shape[-1]) for product in products]
        found = self._kernel(
            [*flat, mixer.weight, mixer.a_log, mixer.dt_bias, pool, read, write],
            template,
            (-(-lines // WARPS), rows, 1),
            32 * WARPS,
            [(keys, dtype), (keys, dtype), (values, dtype), (gates, mx.float32), (gates, dtype)],
        )
        return RuleInputs(*found)


class GatedNorm:
    """The kernel of the norm behind the rule, with its gates; `make` makes it."""

    def __init__(self, make: Make):
        names = ["y", "z", "weight"]
        self._kernel = make(Source("gated_norm", names, ["out"], _NORM, _FUNCTIONS))

    def __call__(self, mixer: Mixer, y: mx.array, z: Product) -> mx.array:
        """Return the outputs [rows, length, heads · dim] for the outputs y [rows, length, heads, dim] of the rule and
        the product of the gates. If `z.whole` has two axes, the result is [rows · length, heads · dim].
        """
        rows, length, heads, dim = y.shape
        template: dict[str, Constant] = {
            "T": y.dtype,
            "HV": heads,
            "DIM": dim,
            "EPSILON": bits_of(mixer.epsilon),
            **z.template("Z"),
        }
        (out,) = self._kernel(
            [y, z.whole, mixer.norm],
            template,
            (-(-rows * length * heads // WARPS), 1, 1),
            32 * WARPS,
            [((*z.whole.shape[:-1], heads * dim), y.dtype)],
        )
        return out


# --- Their check -----------------------------------------------------------------------------------------------------

ROWS, TOKENS = 3, 2

TIMED_ROWS = 8
"""Rows of the decode step that is timed."""


def problem(layer: nn.Module, own: float | None = None) -> str:
    """Return why a layer must not take the fused path that it was given; empty if it may.

    own: the `seconds` of the layer's own code, which the fused path has to beat; None: the path is not timed.
    """

    def check() -> str:
        error, dtype = largest_error(layer)
        if not error <= TOLERANCE[dtype]:
            raise Rejected(f"the fused path is wrong by {error:.1e} in {dtype}")
        if own is not None and (ours := seconds(layer)) >= own:
            figures = f"{ours * 1e6:.0f} µs for {TIMED_ROWS} rows, and {own * 1e6:.0f} without it"
            raise Rejected(f"the fused path is slower: {figures}")
        return ""

    return checked("the fused path through gated delta nets", check, lambda reason: reason)


def largest_error(layer: Any, *, by_tokens: bool = True) -> tuple[float, mx.Dtype]:
    """Return the largest relative difference of outputs and states over a few tokens, and the type of the layer.

    by_tokens: whether the layer is given [tokens, dim] instead of [rows, length, dim].

    The reference is the layer's own code, which also runs on the fused layer if its cache is one of mlx-lm's own.
    """
    rng = np.random.default_rng(0)
    dtype = layer.conv1d.weight.dtype

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    own: Any = ArraysCache(2)
    products = normal(ROWS, layer.conv_kernel_size - 1, layer.conv_dim).astype(dtype)
    state = normal(ROWS, layer.num_v_heads, layer.head_v_dim, layer.head_k_dim)
    own[0], own[1] = products, state
    x = normal(ROWS, TOKENS, layer.hidden_size).astype(dtype)
    want = layer(x, None, own)
    arrays = [products, state]
    shape = StateShape(tuple(StateArray(a.shape[1:], a.dtype) for a in arrays))
    pool = [_apart(a.reshape(ROWS, -1)) for a in arrays]
    mx.eval(pool)
    cache = StateCache(shape)
    view = StateView(mx.arange(2, 2 + ROWS, dtype=mx.int32), mx.arange(2 + ROWS, 2 + 2 * ROWS, dtype=mx.int32))
    cache.bind(pool, view)
    if by_tokens and not layer.takes_tokens(x, TOKENS, None, cache):
        raise Rejected("the fused path does not take tokens")
    got = layer(x.reshape(-1, x.shape[-1]) if by_tokens else x, None, cache).reshape(x.shape)
    if cache.gathered_bytes():
        raise Rejected("the fused path was not taken")
    cache.release()
    mx.eval(got)  # MLX does not order a read of the pool behind the kernels' writes
    pairs = [(got, want)]
    for i, array in enumerate(arrays):
        pairs += [
            (pool[i][2 + ROWS :].reshape(array.shape), own[i]),
            (pool[i][2 : 2 + ROWS].reshape(array.shape), array),
        ]
    return max(relative_error(ours, theirs) for ours, theirs in pairs), dtype


def seconds(layer: Any) -> float:
    """Return the seconds of a layer in a decode step of TIMED_ROWS rows, by the path that it takes now."""
    dtype = layer.conv1d.weight.dtype
    products = StateArray((layer.conv_kernel_size - 1, layer.conv_dim), dtype)
    shape = StateShape((products, StateArray((layer.num_v_heads, layer.head_v_dim, layer.head_k_dim), mx.float32)))
    pool = [mx.zeros((2 * TIMED_ROWS, width), of) for half in shape.halves for width, of in half.lines()]
    read, write = mx.arange(TIMED_ROWS, dtype=mx.int32), mx.arange(TIMED_ROWS, 2 * TIMED_ROWS, dtype=mx.int32)
    x = mx.random.normal((TIMED_ROWS, 1, layer.hidden_size)).astype(dtype)
    mx.eval(pool, read, write, x)

    def step() -> list[mx.array]:
        cache, view = StateCache(shape), StateView(read, write)
        cache.bind(pool, view)
        with gated_delta.using_kernel(cache):
            out = layer(x, None, cache)
        cache.release()
        return [out, *view.written]

    return checking.seconds(step)


def _apart(lines: mx.array) -> mx.array:
    """Return a pool that holds two lines of zeros, then these lines, then as many lines of zeros."""
    return mx.concatenate([mx.zeros_like(lines[:2]), lines, mx.zeros_like(lines)])


# --- Their use -------------------------------------------------------------------------------------------------------

MOST_TOKENS = 8
"""Most tokens of a row on the fused path. Its first kernel takes the tokens of a row one after the other, so MLX's own
operations are faster for long rows."""

verdict = Verdict()
"""The result of the checks of the fused path. It says why layers that could take this path run mlx-lm's code."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of the fused path."""

    inputs: DeltaNetInputs
    rule: GatedDelta
    norm: GatedNorm

    @classmethod
    def made(cls, make: dialect.Make, rule: GatedDelta) -> Kernels:
        """Return the kernels: those that `make` makes, and the given kernel of the rule."""
        return cls(DeltaNetInputs(make), rule, GatedNorm(make))


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a layer that the fused path needs. `merged`: its four linears as one, if they were merged."""

    mixer: Mixer
    merged: Merged | None


def install(model: nn.Module) -> None:
    """Make the model's layers of known kinds take the fused path if this device can run it, its results are right, and,
    on Metal, it is faster.
    """
    layers = fusable(model)
    kernels = _kernels() if layers else None
    if kernels is None:
        return

    def find_problem() -> str:
        must_be_faster = backend.current().kernels.mlx_has_its_own
        return _problem(layers, kernels, seconds(layers[0][0]) if must_be_faster else None)

    if problem := verdict.reach(find_problem):
        log.warning("gated delta nets run their own code: %s", problem)
    else:
        use(layers, kernels)
        log.info("gated delta nets: the fused path is used")


def wrong(model: nn.Module) -> str:
    """Return what is wrong with the fused path that another process chose for this model; empty if nothing is."""
    layers = fusable(model) if verdict.was_given else []
    kernels = _kernels() if layers else None
    return "" if kernels is None else _problem(layers, kernels, None)


def _kernels() -> Kernels | None:
    """Return the kernels of the fused path, if this device can run them."""
    rule = gated_delta.kernel()
    if rule is None or inplace.writing().store is None:
        return None
    (target,) = dialect.available()
    return Kernels.made(dialect.maker(target), rule)


def _problem(layers: Sequence[tuple[nn.Module, Parts]], kernels: Kernels, own: float | None) -> str:
    """Return why layers must not take the fused path, which they are given for this check only; empty if they may.

    own: the seconds of the first layer's own code, which the fused path has to beat; None: the path is not timed.
    """
    use(layers, kernels)
    try:
        return problem(layers[0][0], own)
    finally:
        for layer, _ in layers:
            unmix(layer)


def fusable(model: nn.Module) -> list[tuple[nn.Module, Parts]]:
    """Return the model's layers of known kinds that can take the fused path, each with the parts that it needs."""
    found = [(m, _parts(m)) for m in model.modules() if type(m) is qwen3_5.GatedDeltaNet]
    return [(module, parts) for module, parts in found if parts is not None]


def use(layers: Sequence[tuple[nn.Module, Parts]], kernels: Kernels) -> None:
    """Let these layers take the fused path from here on whenever their cache offers it."""
    for module, parts in layers:
        own: Any = module
        own._parts, own._kernels = parts, kernels
        mix_in(module, FusedDeltaNet)


def _parts(layer: Any) -> Parts | None:
    """Return what the fused path needs of a layer; None if the kernels do not support its dimensions or types."""
    dim, dtype = layer.head_k_dim, layer.conv1d.weight.dtype
    weights = layer.dt_bias, layer.norm.weight
    if dim != layer.head_v_dim or dim % 32 or dim > 256 or any(w.dtype != dtype for w in weights):
        return None
    if layer.sharding_group is not None or layer.conv_kernel_size < 2 or "bias" in layer.conv1d:
        return None
    mixer = Mixer(
        layer.conv1d.weight,
        layer.A_log,
        layer.dt_bias,
        layer.norm.weight,
        float(layer.norm.eps),
        layer.num_k_heads,
        layer.num_v_heads,
        dim,
    )
    return Parts(mixer, home_of(_linears(layer)))


def _linears(layer: Any) -> tuple[nn.Module, ...]:
    """Return the linears of queries, keys and values, of the decay, of the strength, and of the gates."""
    return layer.in_proj_qkv, layer.in_proj_a, layer.in_proj_b, layer.in_proj_z


class FusedDeltaNet:
    """Mixin of a layer that takes the fused path when its cache offers it."""

    _parts: Parts
    _kernels: Kernels

    def takes_tokens(self, x: mx.array, length: int, mask: mx.array | None, cache: Any) -> bool:
        """Return whether the layer takes x as [tokens, dim] in a step whose rows have this length."""
        return _offered(x, length, mask, cache, self._parts.mixer) is not None

    def __call__(self, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """Return the layer's output, by the fused path if the cache offers it.

        inputs: [rows, length, dim], or [rows · length, dim] where `takes_tokens` says so.
        """
        mixer = self._parts.mixer
        length = inputs.shape[1] if inputs.ndim == 3 else 1  # with two axes, `takes_tokens` has checked the length
        lines = _offered(inputs, length, mask, cache, mixer)
        if lines is None:
            output: mx.array = super().__call__(inputs, mask, cache)  # type: ignore[misc]
            return output
        layer: Any = self
        (products, state), kernels = lines, self._kernels
        qkv, a, b, z = self._products(inputs)
        given = kernels.inputs(mixer, (qkv, a, b), products.pool, products.read, products.write)
        y = kernels.rule.in_place(given, state.pool, state.read, state.write)
        cache.wrote(products, state)
        output = layer.out_proj(kernels.norm(mixer, y, z))
        return output

    def _products(self, x: mx.array) -> list[Product]:
        """Return the products of `_linears`: parts of one array if they are merged and no adapter changes any of them.

        Otherwise each product is an array of its own.
        """
        linears, merged = _linears(self), self._parts.merged
        if merged is None or not merged.joins(x) or any(getattr(own, "is_changed", False) for own in linears):
            return [Product(own(x)) for own in linears]
        whole = merged.whole(x)
        return [Product(whole, at) for at in merged.places(linears)[:-1]]


def _offered(
    x: mx.array, length: int, mask: mx.array | None, cache: Any, mixer: Mixer
) -> tuple[PoolLines, PoolLines] | None:
    """Return the lines of the last products and of the state of the rule, if the fused path can use them for x."""
    if not isinstance(cache, StateCache) or mask is not None or length > MOST_TOKENS:
        return None
    products, state = cache.lines(0), cache.lines(1)
    if products is None or state is None:
        return None
    types = x.dtype, products.pool.dtype
    return (products, state) if all(dtype == mixer.weight.dtype for dtype in types) else None
