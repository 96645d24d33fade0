"""Replaces mlx-lm's functions for the gated delta rule by a kernel that reads and writes states in the pool.

On CUDA mlx-lm has operations only: a loop over tokens, about ten operations each, most of them over the whole state.
The kernel computes all rows there. On Metal mlx-lm has a kernel of its own, whose states are gathered from the pool and
written back. There mlx-lm's kernel computes rows that begin a sequence and long chunks, and the kernel in the pool
computes short rows that continue a sequence. Only layers that are called within `using_kernel` use the kernel in the
pool; trainers use mlx-lm's functions, which have a gradient.

By this rule recurrent layers of Qwen3-Next, Qwen3.5 and others update their states. For each token and head, with the
state S [DV, DK]: S ← S · decay; S ← S + strength · (v − S k) kᵀ; y = S q (https://arxiv.org/abs/2412.06464).

Each warp updates `ROWS` rows of one head's state. Each of its 32 lanes holds DK / 32 consecutive columns of these rows
in registers, for all tokens. The state is read from and written to lines of the pool (`in_place`), or read from one
array and written to a new one (`__call__`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gated_delta
from mlx_lm.models.gated_delta import gated_delta_ops

from mlx_tandem.model import backend
from mlx_tandem.model.cache.states import StateCache
from mlx_tandem.model.kernels import checking, dialect, inplace
from mlx_tandem.model.kernels.checking import Rejected, Verdict, checked, relative_error
from mlx_tandem.model.kernels.dialect import Constant, Make, Source
from mlx_tandem.model.kernels.inplace import Store

log = logging.getLogger(__name__)

# --- The kernel ------------------------------------------------------------------------------------------------------

WARPS = 4
"""Warps of a block of threads."""

ROWS = 4
"""Rows of the state per warp. Several rows hide the latency of the sums over a warp."""

_BODY = r"""
  constexpr int EACH = DK / 32;
  const int sequence = GROUP_Z, head = GROUP_Y, key_head = head / (HV / HK);
  const int first = (GROUP_X * (THREADS / 32) + WARP) * ROWS;  // row of the state
  if (first >= DV) return;
  const int length = v_shape[1];
  const size_t within = ((size_t)head * DV + first) * DK + LANE * EACH;
  const size_t width = (size_t)HV * DV * DK;  // of a line
  float s[ROWS][EACH];
  constexpr bool BY_FOUR = EACH % 4 == 0 && sizeof(S) == 4;
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const bool outside = first + r >= DV;
    const auto source = state + (outside ? 0 : (size_t)read[sequence] * width + within + r * DK);
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (BY_FOUR) {
        const uint4 four = outside ? WORDS4(0u, 0u, 0u, 0u) : LOAD16(source + j);
        s[r][j] = FLOAT_BITS(four.x), s[r][(j + 1) % EACH] = FLOAT_BITS(four.y);
        s[r][(j + 2) % EACH] = FLOAT_BITS(four.z), s[r][(j + 3) % EACH] = FLOAT_BITS(four.w);
      } else {
        s[r][j] = outside ? 0.0f : float(source[j]);
      }
    }
  }
  size_t token = (size_t)sequence * length;
  for (int t = 0; t < length; t++, token++) {
    float keys[EACH], queries[EACH], decay[EACH];
    UNROLL
    for (int j = 0; j < EACH; j++) {
      const size_t at = (token * HK + key_head) * DK + LANE * EACH + j;
      keys[j] = float(k[at]);
      queries[j] = float(q[at]);
      decay[j] = BY_COLUMN ? float(g[(token * HV + head) * DK + LANE * EACH + j]) : float(g[token * HV + head]);
    }
    const float strength = float(beta[token * HV + head]);
    float retrieved[ROWS], out[ROWS];  // S k and S q
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      retrieved[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] *= decay[j];
        retrieved[r] += s[r][j] * keys[j];
      }
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      UNROLL
      for (int r = 0; r < ROWS; r++) retrieved[r] += SHUFFLE_XOR(retrieved[r], mask);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      const float value = first + r < DV ? float(v[(token * HV + head) * DV + first + r]) : 0.0f;
      const float delta = (value - retrieved[r]) * strength;
      out[r] = 0.0f;
      UNROLL
      for (int j = 0; j < EACH; j++) {
        s[r][j] += keys[j] * delta;
        out[r] += s[r][j] * queries[j];
      }
    }
    UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
      UNROLL
      for (int r = 0; r < ROWS; r++) out[r] += SHUFFLE_XOR(out[r], mask);
    }
    UNROLL
    for (int r = 0; r < ROWS; r++)
      if (LANE == r && first + r < DV) y[(token * HV + head) * DV + first + r] = T(out[r]);
  }
  auto target = (GLOBAL S*)AFTER;
  const size_t line = (size_t)write[sequence];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    if (first + r >= DV) continue;
    const auto row = target + line * width + within + r * DK;
    UNROLL
    for (int j = 0; j < EACH; j += BY_FOUR ? 4 : 1) {
      if (BY_FOUR) {
        STORE16(row + j, WORDS4(WORD_BITS(s[r][j]), WORD_BITS(s[r][(j + 1) % EACH]),
                                WORD_BITS(s[r][(j + 2) % EACH]), WORD_BITS(s[r][(j + 3) % EACH])));
      } else {
        row[j] = S(s[r][j]);
      }
    }
  }
"""


class RuleInputs(NamedTuple):
    """The inputs of the rule over `length` tokens, as mlx-lm names them.

    q, k: [rows, length, key heads, DK]; v: [rows, length, heads, DV]; g: the decay, [rows, length, heads], or
    [rows, length, heads, DK] for each column of the state; beta: the strength, [rows, length, heads].
    """

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array
    beta: mx.array


def fits(inputs: RuleInputs) -> bool:
    """Return whether the kernel computes inputs of this form."""
    return inputs.q.shape[-1] % 32 == 0 and inputs.q.shape[-1] <= 256


class GatedDelta:
    """The kernel for one target."""

    def __init__(self, make: Make):
        names = ["q", "k", "v", "g", "beta", "state", "read", "write"]
        apart, in_place = "#define AFTER after\n", "#define AFTER state\n"
        self._kernel = make(Source("gated_delta", names, ["y", "after"], _BODY, apart))
        self._in_place = make(Source("gated_delta_in_place", names, ["y"], _BODY, in_place, writes=["state"]))

    def __call__(self, inputs: RuleInputs, state: mx.array) -> tuple[mx.array, mx.array]:
        """Return the outputs [rows, length, heads, DV] in the type of `q`, and the states after all tokens.

        state: [rows, heads, DV, DK], as the states after.
        """
        rows = mx.arange(state.shape[0], dtype=mx.int32)
        lines = state.reshape(state.shape[0], -1)
        y, after = self._kernel(*_call(inputs, lines, rows, rows, after=state.shape))
        return y, after

    def in_place(self, inputs: RuleInputs, pool: mx.array, read: mx.array, write: mx.array) -> mx.array:
        """Write the new states into the pool, and return the outputs, which depend on this write.

        pool: [lines, heads · DV · DK]; read, write: int32 [rows], the line of each row's state before and after. No
        line that is written belongs to another row.
        """
        (y,) = self._in_place(*_call(inputs, pool, read, write))
        return y


def _call(
    inputs: RuleInputs, pool: mx.array, read: mx.array, write: mx.array, *, after: tuple[int, ...] = ()
) -> tuple[list[mx.array], dict[str, Constant], tuple[int, int, int], int, list[tuple[tuple[int, ...], mx.Dtype]]]:
    """Return the arguments of a kernel. `after`: the shape of its second output; empty: it has none."""
    (rows, _, key_heads, dk), (heads, dv) = inputs.q.shape, inputs.v.shape[2:]
    template: dict[str, Constant] = {
        "T": inputs.q.dtype,
        "S": pool.dtype,
        "DK": dk,
        "DV": dv,
        "HK": key_heads,
        "HV": heads,
        "ROWS": ROWS,
        "BY_COLUMN": inputs.g.ndim == 4,
    }
    groups = (-(-dv // (WARPS * ROWS)), heads, rows)
    outputs: list[tuple[tuple[int, ...], mx.Dtype]] = [(inputs.v.shape, inputs.q.dtype)]
    outputs += [(after, pool.dtype)] if after else []
    return [*inputs, pool, read, write], template, groups, 32 * WARPS, outputs


# --- Its check -------------------------------------------------------------------------------------------------------

Rule = Callable[..., tuple[mx.array, mx.array]]
"""Function with the arguments of mlx-lm's `gated_delta_ops`, which returns the outputs and the states after."""

TOLERANCE = {mx.float32: 1e-4, mx.float16: 1e-2, mx.bfloat16: 5e-2}
"""Largest difference from mlx-lm's operations, as a fraction of the largest number."""


class Sizes(NamedTuple):
    """The heads of keys and of values, and the rows and columns of a head's state."""

    key_heads: int
    heads: int
    dv: int
    dk: int


TIMED_ROWS, TIMED = 8, Sizes(32, 32, 128, 128)
"""Rows and sizes of the decode step that is timed. The heads are those of Qwen3.5-9B."""

UNEVEN = Sizes(2, 4, 26, 64)
"""Sizes with fewer heads of keys than of values, and with rows that no warp has as a whole."""


def problem(make: Make, rival: Rule | None = None, store: Store | None = None, *, only_in_pool: bool = False) -> str:
    """Return why the kernel made by `make` cannot be used; empty if it can.

    rival: a function that the kernel has to be faster than. Its states are written by `store`. only_in_pool: whether
    the kernel is used only for states in the pool, so that its other form is neither compiled nor checked.
    """

    def check() -> str:
        kernel = GatedDelta(make)
        # Both ways to load a state, in both types of models. Each form takes a GPU's compiler a second or more, so the
        # first is the one that is timed.
        for dtype, sizes, by_column in ((mx.bfloat16, TIMED, False), (mx.float32, UNEVEN, True)):
            error = largest_error(kernel, dtype, sizes, by_column=by_column, only_in_pool=only_in_pool)
            if not error <= TOLERANCE[dtype]:
                raise Rejected(f"wrong by {error:.1e} in {dtype}")
        if rival is not None and store is not None:
            ours, theirs = _seconds(kernel, rival, store)
            if ours >= theirs:
                raise Rejected(f"slower: {ours * 1e6:.0f} µs for {TIMED_ROWS} rows, mlx-lm's takes {theirs * 1e6:.0f}")
        return ""

    return checked("the kernel of the gated delta rule", check, lambda reason: reason)


def largest_error(
    kernel: GatedDelta, dtype: mx.Dtype, sizes: Sizes, *, by_column: bool, only_in_pool: bool = False
) -> float:
    """Return the largest difference of outputs and states over a chunk, in place and not, as a fraction of the largest
    number. `by_column`: as in `_drawn`; `only_in_pool`: as in `problem`.
    """
    inputs, state = _drawn(dtype, sizes, by_column=by_column)
    want, want_after = gated_delta_ops(*inputs, state)
    rows = len(state)
    lines = state.reshape(rows, -1)
    pool = mx.concatenate([mx.zeros_like(lines[:2]), lines, mx.zeros_like(lines)])
    mx.eval(pool)
    read, write = mx.arange(2, 2 + rows, dtype=mx.int32), mx.arange(2 + rows, 2 + 2 * rows, dtype=mx.int32)
    together = kernel.in_place(inputs, pool, read, write)
    mx.eval(together)  # MLX does not order a read of the pool behind the kernel's write
    pairs = [] if only_in_pool else list(zip(kernel(inputs, state), (want, want_after), strict=True))
    pairs += [
        (together, want),
        (pool[2 + rows :].reshape(state.shape), want_after),
        (pool[2 : 2 + rows].reshape(state.shape), state),
    ]
    return max(relative_error(ours, theirs) for ours, theirs in pairs)


def _drawn(dtype: mx.Dtype, sizes: Sizes, *, by_column: bool) -> tuple[RuleInputs, mx.array]:
    """Return random inputs of five tokens of three rows, and their states before.

    by_column: whether the decay is given for each column of the state.
    """
    rng = np.random.default_rng(0)
    rows, length, (key_heads, heads, dv, dk) = 3, 5, sizes

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5)

    decay = rng.uniform(0.5, 1.0, (rows, length, heads, dk) if by_column else (rows, length, heads))
    strength = rng.uniform(0.1, 0.9, (rows, length, heads))
    inputs = RuleInputs(
        normal(rows, length, key_heads, dk).astype(dtype),
        normal(rows, length, key_heads, dk).astype(dtype),
        normal(rows, length, heads, dv).astype(dtype),
        mx.array(decay.astype(np.float32)),
        mx.array(strength.astype(np.float32)).astype(dtype),
    )
    return inputs, normal(rows, heads, dv, dk)


def _seconds(kernel: GatedDelta, rival: Rule, store: Store) -> tuple[float, float]:
    """Return the seconds of one token of ROWS rows, with states in a pool: by the kernel, and by `rival`. For
    `rival` the states are gathered and written back.
    """
    _, heads, dim, _ = TIMED
    q, k, v = (mx.random.normal((TIMED_ROWS, 1, heads, dim)).astype(mx.bfloat16) for _ in range(3))
    inputs = RuleInputs(
        q, k * dim**-0.5, v, mx.full((TIMED_ROWS, 1, heads), 0.9), mx.full((TIMED_ROWS, 1, heads), 0.5, v.dtype)
    )
    pool = mx.zeros((2 * TIMED_ROWS, heads * dim * dim))
    read, write = mx.arange(TIMED_ROWS, dtype=mx.int32), mx.arange(TIMED_ROWS, 2 * TIMED_ROWS, dtype=mx.int32)
    mx.eval(*inputs, pool, read, write)

    def gathered() -> list[mx.array]:
        y, state = rival(*inputs, pool[read].reshape(TIMED_ROWS, heads, dim, dim))
        return [y, store(pool, write, state.reshape(TIMED_ROWS, -1))]

    ours = checking.seconds(lambda: [kernel.in_place(inputs, pool, read, write)])
    return ours, checking.seconds(gathered)


# --- Its use ---------------------------------------------------------------------------------------------------------

MOST_TOKENS = 8
"""Most tokens of a row that the kernel computes where mlx-lm has a kernel. Longer rows spend their time in the rule and
not in moving states, and mlx-lm's kernel has a form for them."""

verdict = Verdict()
"""The result of the checks of the kernel. It says why mlx-lm's functions compute the rule instead."""

_operations: Rule = gated_delta.gated_delta_ops
_kernel: Rule = gated_delta.gated_delta_kernel
_caches: list[StateCache] = []  # of the layers that are being called, the innermost last


@cache
def kernel() -> GatedDelta | None:
    """Return the kernel, if the default device can run it; it is checked first, and timed where mlx-lm has a kernel."""
    targets = dialect.available()
    if not targets:
        return None
    make = dialect.maker(targets[0])
    if problem := verdict.reach(lambda: _problem(make)):
        log.warning("mlx-lm's own functions compute the gated delta rule: the kernel is %s", problem)
        return None
    log.info("gated delta rule: the kernel is used")
    return GatedDelta(make)


def wrong(model: nn.Module) -> str:
    """Return what is wrong with the kernel that another process chose for this model; empty if nothing is."""
    if not verdict.was_given or not _is_used_by(model):
        return ""
    only_in_pool = backend.current().kernels.mlx_has_its_own
    return "".join(problem(dialect.maker(target), only_in_pool=only_in_pool) for target in dialect.available()[:1])


def _problem(make: dialect.Make) -> str:
    """Return why the kernel made by `make` must not be used on this device; empty if it may."""
    if not backend.current().kernels.mlx_has_its_own:
        return problem(make)
    store = inplace.writing().store
    if store is None:
        return "not used: MLX's own operations write the states"
    rival = _operations if gated_delta._gated_delta_kernel is None else _kernel
    return problem(make, rival, store, only_in_pool=True)


@contextmanager
def using_kernel(cache: StateCache) -> Iterator[None]:
    """Within this context, mlx-lm's functions use the kernel, for the layer with this cache."""
    _caches.append(cache)
    try:
        yield
    finally:
        _caches.pop()


def install(model: nn.Module) -> None:
    """Replace mlx-lm's functions within `using_kernel`, if the model has layers that use them."""
    if _is_used_by(model):
        kernel()  # it is checked here, since no array can be evaluated while a step is traced
        only_in_pool = backend.current().kernels.mlx_has_its_own
        gated_delta.gated_delta_ops = _replacing(_operations, only_in_pool=only_in_pool)
        gated_delta.gated_delta_kernel = _replacing(_kernel, only_in_pool=only_in_pool)


def _is_used_by(model: nn.Module) -> bool:
    return any(hasattr(sys.modules[type(m).__module__], "gated_delta_update") for m in model.modules())


def _replacing(own: Rule, *, only_in_pool: bool) -> Rule:
    """Return a function that uses the kernel where it can, and mlx-lm's function `own` elsewhere.

    only_in_pool: whether `own` computes rows of more than MOST_TOKENS and rows whose states are not in the pool.
    """

    def rule(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        inputs = RuleInputs(q, k, v, g, beta)
        found = kernel() if _caches and state is not None and mask is None and fits(inputs) else None
        if found is None or state is None or (only_in_pool and q.shape[1] > MOST_TOKENS):
            return own(q, k, v, g, beta, state, mask)
        lines = _caches[-1].lines_of(state) if inplace.writing().store is not None else None
        if lines is None:
            return own(q, k, v, g, beta, state, mask) if only_in_pool else found(inputs, state)
        y = found.in_place(inputs, lines.pool, lines.read, lines.write)
        _caches[-1].wrote(lines)
        return y, state

    return rule
