"""The kernel that draws greedy tokens beside numpy on this device: whether it is right, and whether it is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.argmax import Argmax
from mlx_tandem.model.step.sampler import Greedy, by_argmax
from mlx_tandem.model.trials import machine

log = logging.getLogger(__name__)

Logits = npt.NDArray[np.float32]

ROWS = 16  # of the step that is timed
CHAIN = 8  # of them in a row, so that the device is kept busy


class Choice(NamedTuple):
    greedy: Greedy
    reason: str  # for people


def choose(
    dtype: mx.Dtype,
    vocabulary: int,
    makers: Sequence[dialect.Make] | None = None,
    seconds: Callable[[Greedy, mx.Dtype, int], float] | None = None,
) -> Choice:
    """What draws greedy tokens from logits of this type and width, and from float32, in which they are penalised. Its
    kernels are compiled here, and not while serving. `makers`: for the targets of this device, if not its own;
    `seconds`: what times a draw."""
    seconds = seconds or _seconds
    if makers is None:
        makers = [dialect.maker(target) for target in dialect.available()]
    if not makers:
        return Choice(by_argmax, "this device has no kernels")
    try:
        kernel = Argmax(makers[0])
        problem = wrong(kernel, dict.fromkeys((dtype, mx.float32)), vocabulary)
        if not problem:
            ours, theirs = (seconds(greedy, dtype, vocabulary) for greedy in (kernel, by_argmax))
            figures = f"{ours * 1e6:.0f} µs for {ROWS} rows, MLX's operations take {theirs * 1e6:.0f}"
            problem = "" if ours < theirs else f"slower: {figures}"
    except Exception as e:  # whatever a compiler or a driver says
        log.warning("the kernel for greedy tokens failed its check", exc_info=True)
        problem = f"{type(e).__name__}: {e}".strip()[:500]
    mx.clear_cache()
    if problem:
        return Choice(by_argmax, f"the kernel is not taken: {problem}")
    return Choice(kernel, f"the kernel is faster: {figures}")


def wrong(greedy: Greedy, dtypes: Iterable[mx.Dtype], vocabulary: int) -> str:
    """What is wrong with tokens of random logits; empty: nothing."""
    for dtype in dtypes:
        logits = mx.array(invent(np.random.default_rng(0), vocabulary)).astype(dtype)
        for part in (logits, logits[:1]):
            got, want = np.array(greedy(part)), expected(np.array(part.astype(mx.float32)))
            if not np.array_equal(got, want):
                row = int((got != want).argmax())
                return f"token {got[row]} instead of {want[row]} in row {row} of {len(want)}, {dtype}"
    return ""


def expected(logits: Logits) -> npt.NDArray[np.int32]:
    peak = logits.max(-1)
    return np.where(np.isfinite(peak), logits.argmax(-1), NOT_A_NUMBER).astype(np.int32)


def invent(rng: np.random.Generator, vocabulary: int) -> Logits:
    """Rows with the largest anywhere, at either end, in several places, and of all that is not finite."""
    rows = np.full((52, vocabulary), -1, np.float32)
    rows[:20] = rng.normal(0, 3, (20, vocabulary))
    rows[0] -= 99  # all below zero
    rows[1] = rng.integers(-2, 3, vocabulary)  # in several places
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
    logits = mx.random.normal((ROWS, vocabulary)).astype(dtype)
    return machine.seconds(lambda: [greedy(logits)], CHAIN)
