"""Check of the kernel that picks greedy tokens: it must agree with numpy on this device and be faster than MLX.

`choose` runs at start and returns the function that the sampler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernel_checks import machine
from mlx_tandem.model.kernel_checks.frame import Choice, Rejected, checked, makers_of_device
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.argmax import Argmax
from mlx_tandem.model.step.sampler import Greedy, by_argmax

Logits = npt.NDArray[np.float32]

ROWS = 16
"""Rows of logits in a timed call."""

CHAIN = 8
"""Timed calls in a row, which keep the device busy."""


def choose(
    dtype: mx.Dtype,
    vocabulary: int,
    makers: Sequence[dialect.Make] | None = None,
    seconds: Callable[[Greedy, mx.Dtype, int], float] | None = None,
) -> Choice[Greedy]:
    """Return the function that picks greedy tokens from logits [rows, vocabulary] of type `dtype`.

    Kernels for `dtype` and for float32, the type of penalised logits, are compiled here and not while serving.

    Args:
        dtype: The type of the model's logits.
        vocabulary: The number of logits per row.
        makers: Makers of kernels; by default those of this device.
        seconds: Measures the duration of one call; by default on this device.
    """
    makers = makers_of_device(makers)
    if not makers:
        return Choice(by_argmax, "this device has no kernels")
    time_of = seconds or _seconds

    def check() -> Choice[Greedy]:
        kernel = Argmax(makers[0])
        if problem := wrong(kernel, dict.fromkeys((dtype, mx.float32)), vocabulary):
            raise Rejected(problem)
        ours, theirs = (time_of(greedy, dtype, vocabulary) for greedy in (kernel, by_argmax))
        figures = f"{ours * 1e6:.0f} µs for {ROWS} rows, MLX's operations take {theirs * 1e6:.0f}"
        if ours >= theirs:
            raise Rejected(f"slower: {figures}")
        return Choice(kernel, f"the kernel is faster: {figures}")

    def otherwise(reason: str) -> Choice[Greedy]:
        return Choice(by_argmax, f"the kernel is not used: {reason}")

    return checked("the kernel for greedy tokens", check, otherwise)


def made() -> Greedy:
    """Return the kernel of this device, which another process has checked."""
    return Argmax(makers_of_device(None)[0])


def wrong(greedy: Greedy, dtypes: Iterable[mx.Dtype], vocabulary: int) -> str:
    """Return what is wrong with the tokens picked from random logits; empty if nothing is."""
    for dtype in dtypes:
        logits = mx.array(invent(np.random.default_rng(0), vocabulary)).astype(dtype)
        for part in (logits, logits[:1]):
            got, want = np.array(greedy(part)), expected(np.array(part.astype(mx.float32)))
            if not np.array_equal(got, want):
                row = int((got != want).argmax())
                return f"token {got[row]} instead of {want[row]} in row {row} of {len(want)}, {dtype}"
    return ""


def expected(logits: Logits) -> npt.NDArray[np.int32]:
    """Return the greedy token of each row by numpy, or NOT_A_NUMBER where the largest logit is not finite."""
    peak = logits.max(-1)
    return np.where(np.isfinite(peak), logits.argmax(-1), NOT_A_NUMBER).astype(np.int32)


def invent(rng: np.random.Generator, vocabulary: int) -> Logits:
    """Return test logits [52, vocabulary]: random rows, ties, extremes at either end, zeros of both signs, NaN and
    infinity.
    """
    rows = np.full((52, vocabulary), -1, np.float32)
    rows[:20] = rng.normal(0, 3, (20, vocabulary))
    rows[0] -= 99  # all below zero
    rows[1] = rng.integers(-2, 3, vocabulary)  # the maximum in several places
    rows[2] = rng.integers(0, 2, vocabulary) * -9.0
    rows[3] = np.where(rng.integers(0, 2, vocabulary), 0.0, -0.0)
    rows[4] = -7
    rows[5, 0] = rows[6, -1] = rows[7, rng.integers(vocabulary)] = 50
    rows[8, [0, -1]] = 60
    for row, number in zip(range(9, 13), (np.nan, -np.nan, np.inf, -np.inf), strict=True):
        rows[row, rng.integers(vocabulary)] = number
    rows[13, 0] = rows[14, -1] = np.nan
    rows[15, 0] = rows[16, -1] = np.inf
    rows[17] = -np.inf
    rows[18, :-1] = -np.inf
    rows[range(20, 52), np.linspace(0, vocabulary - 1, 32).astype(int)] = 1
    return rows


def _seconds(greedy: Greedy, dtype: mx.Dtype, vocabulary: int) -> float:
    """Return the seconds of one call on ROWS rows."""
    logits = mx.random.normal((ROWS, vocabulary)).astype(dtype)
    return machine.seconds(lambda: [greedy(logits)], CHAIN)
