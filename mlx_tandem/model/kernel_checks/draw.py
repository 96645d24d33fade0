"""Check of the kernels that draw tokens: they must agree with numpy on this device and be faster than MLX.

`choose` runs at start and returns the function that the sampler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import NOT_A_NUMBER, mask_words
from mlx_tandem.model.kernel_checks import machine
from mlx_tandem.model.kernel_checks.frame import Choice, Rejected, checked, makers_of_device
from mlx_tandem.model.kernels import dialect
from mlx_tandem.model.kernels.draw import Draw, Masks, Noise
from mlx_tandem.model.step.mask_table import bits_of
from mlx_tandem.model.step.sampler import Pick, by_operations, gumbel_noise

Logits = npt.NDArray[np.float32]

ROWS = 16
"""Rows of logits in a timed call."""

CHAIN = 8
"""Timed calls in a row, which keep the device busy."""

CLOSE = 1e-5
"""Most by which the sum of a drawn token may lie below the largest, relative to the largest number in the sums.

The kernel and MLX round logarithms differently.
"""


class Seconds(NamedTuple):
    """The duration of a call for greedy rows, and of one for rows with noise."""

    greedy: float
    noisy: float


def choose(
    dtype: mx.Dtype,
    vocabulary: int,
    makers: Sequence[dialect.Make] | None = None,
    seconds: Callable[[Pick, mx.Dtype, int], Seconds] | None = None,
) -> Choice[Pick]:
    """Return the function that picks tokens from logits [rows, vocabulary] of type `dtype`.

    Kernels for `dtype` and for float32, the type of penalised logits, are compiled here and not while serving.

    Args:
        dtype: The type of the model's logits.
        vocabulary: The number of logits per row.
        makers: Makers of kernels; by default those of this device.
        seconds: Measures the duration of calls; by default on this device.
    """
    makers = makers_of_device(makers)
    if not makers:
        return Choice(by_operations, "this device has no kernels")
    time_of = seconds or _seconds

    def check() -> Choice[Pick]:
        kernels = Draw(makers[0])
        if problem := wrong(kernels, dict.fromkeys((dtype, mx.float32)), vocabulary):
            raise Rejected(problem)
        ours, theirs = (time_of(pick, dtype, vocabulary) for pick in (kernels, by_operations))
        figures = (
            f"{ours.greedy * 1e6:.0f} µs for {ROWS} greedy rows, MLX's operations take {theirs.greedy * 1e6:.0f}; "
            f"{ours.noisy * 1e6:.0f} and {theirs.noisy * 1e6:.0f} with noise"
        )
        if ours.greedy >= theirs.greedy or ours.noisy >= theirs.noisy:
            raise Rejected(f"slower: {figures}")
        return Choice(kernels, f"the kernels are faster: {figures}")

    def otherwise(reason: str) -> Choice[Pick]:
        return Choice(by_operations, f"the kernels are not used: {reason}")

    return checked("the kernels that draw tokens", check, otherwise)


def made() -> Pick:
    """Return the kernels of this device, which another process has checked."""
    return Draw(makers_of_device(None)[0])


def wrong(pick: Pick, dtypes: Iterable[mx.Dtype], vocabulary: int) -> str:
    """Return what is wrong with the tokens picked from random logits; empty if nothing is."""
    rng = np.random.default_rng(0)
    noise, masks = invent_draws(rng, vocabulary)
    for dtype in dtypes:
        logits = mx.array(invent(rng, vocabulary)).astype(dtype)
        for how in ((None, None), (noise, None), (noise, masks), (None, masks)):
            for rows in (len(logits), 1):
                problem = difference(pick, logits[:rows], *_first(how, rows))
                if problem:
                    return f"{problem} of {rows}, {dtype}"
    return ""


def difference(pick: Pick, logits: mx.array, noise: Noise | None, masks: Masks | None) -> str:
    """Return how the picked tokens differ from what numpy picks; empty if they do not."""
    with np.errstate(invalid="ignore"):  # some numbers are not finite
        sums, size = _sums(logits, noise, masks)
        got, want = np.array(pick(logits, noise, masks)), expected(sums)
        near = got == want
        if noise is not None:
            chosen = sums[np.arange(len(got)), np.clip(got, 0, None)]
            near |= (got >= 0) & (want >= 0) & (sums.max(-1) - chosen <= CLOSE * size)
    if near.all():
        return ""
    row = int(near.argmin())
    return f"token {got[row]} instead of {want[row]} in row {row}"


def expected(sums: npt.NDArray[np.floating]) -> npt.NDArray[np.int32]:
    """Return the first token with the largest sum of each row, or NOT_A_NUMBER where it is not finite."""
    peak = sums.max(-1)
    return np.where(np.isfinite(peak), sums.argmax(-1), NOT_A_NUMBER).astype(np.int32)


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


def invent_draws(rng: np.random.Generator, vocabulary: int) -> tuple[Noise, Masks]:
    """Return noise and masks for the rows of `invent`: greedy and noisy rows, and masks that allow all tokens, half of
    them, few, one at either end, or none.
    """
    temperature = rng.choice(np.array([0.0, 0.1, 1.0, 2.0, 1e6], np.float32), (52, 1))
    key = rng.integers(1 << 32, size=(52, 2), dtype=np.uint32)
    position = rng.integers(1 << 20, size=52).astype(np.int32)
    words = mask_words(vocabulary)
    table = rng.integers(1 << 32, size=(16, words), dtype=np.uint32)
    table[0] = 0xFFFFFFFF
    table[1:6] = 0
    table[2, rng.integers(vocabulary) // 32] = 0xFFFF0001
    table[3, 0] = 1
    table[4, (vocabulary - 1) // 32] = 1 << ((vocabulary - 1) % 32)
    table[5] = rng.random(words) < 0.01
    places = rng.integers(len(table), size=52).astype(np.int32)
    noise = Noise(mx.array(key), mx.array(position), mx.array(temperature))
    return noise, Masks(mx.array(places), mx.array(table))


def _first(how: tuple[Noise | None, Masks | None], rows: int) -> tuple[Noise | None, Masks | None]:
    """Return noise and masks of the first rows."""
    noise, masks = how
    return (
        None if noise is None else Noise(*(array[:rows] for array in noise)),
        None if masks is None else masks._replace(places=masks.places[:rows]),
    )


def _sums(
    logits: mx.array, noise: Noise | None, masks: Masks | None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the numbers [rows, vocabulary] of which the largest wins, and the size [rows] of the largest summand."""
    numbers = np.array(logits.astype(mx.float32)).astype(np.float64)
    if masks is not None:
        allowed = np.array(bits_of(masks.table[masks.places], logits.shape[1]))
        numbers = np.where(allowed, numbers, -np.inf)
    if noise is None:
        return numbers, np.ones(len(numbers))
    random = np.array(gumbel_noise(noise.key, noise.position, logits.shape[1])).astype(np.float64)
    random *= np.array(noise.temperature)
    return numbers + random, np.maximum(_largest(numbers), _largest(random))


def _largest(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest absolute value of the finite numbers of each row."""
    largest: npt.NDArray[np.float64] = np.abs(np.where(np.isfinite(numbers), numbers, 0.0)).max(-1)
    return largest


def _seconds(pick: Pick, dtype: mx.Dtype, vocabulary: int) -> Seconds:
    """Return the seconds of one call on ROWS rows, greedy and with noise."""
    logits = mx.random.normal((ROWS, vocabulary)).astype(dtype)
    noise, _ = _first((invent_draws(np.random.default_rng(0), vocabulary)[0], None), ROWS)
    greedy = machine.seconds(lambda: [pick(logits, None, None)], CHAIN)
    return Seconds(greedy, machine.seconds(lambda: [pick(logits, noise, None)], CHAIN))
