"""Check of the kernels that pick tokens: they must agree with numpy on this device and be faster than MLX.

numpy adds MLX's noise to the logits. Both kernels are timed without masks, the second beside MLX's operations that are
not compiled: to compile them takes minutes at a first start. `choose` runs at start and returns what the sampler uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlx_tandem.engine.plan import NOT_A_NUMBER, mask_words
from mlx_tandem.model.kernels import checking, dialect
from mlx_tandem.model.kernels.checking import Choice, Rejected, checked, makers_of_device
from mlx_tandem.model.ops.sampling.draw import GumbelMax, Limits, Masks, Noise, TruncatedDraw
from mlx_tandem.model.ops.sampling.masks import bits_of
from mlx_tandem.model.ops.sampling.sampler import (
    MLX_PICKERS,
    Pick,
    Pickers,
    PickTruncated,
    SamplingArrays,
    SamplingFlags,
    gumbel_noise,
    sample,
)

Logits = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.float64]

ROWS = 16
"""Rows of logits in a timed call."""

_FEW = 4
"""Rows of logits with which a kernel that an earlier start chose is checked again."""

CHAIN = 8
"""Timed calls in a row, which keep the device busy."""

CLOSE = 1e-5
"""Most by which the sum of a drawn token may lie below the row's largest sum, relative to the row's largest logit or
noise term. The kernel and MLX round logarithms differently."""

SHARE = 1e-4
"""Relative error of top-p's share that is allowed: masses of many tokens are added up in float32."""


class SamplingKernels(Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a kernel draws tokens among all tokens, and whether one draws among the likeliest."""

    reason: str
    plain: bool = False
    truncated: bool = False


class Seconds(NamedTuple):
    """The duration of a call for greedy rows, for rows with noise, and for rows with noise and truncations."""

    greedy: float
    noisy: float
    truncated: float


def choose(
    dtype: mx.Dtype,
    vocabulary: int,
    makers: Sequence[dialect.Make] | None = None,
    seconds: Callable[[Pickers, mx.Dtype, int], Seconds] | None = None,
) -> Choice[Pickers]:
    """Return the functions that pick tokens from logits [rows, vocabulary] of type `dtype`.

    Kernels for `dtype` and for float32, the type of penalised logits, are compiled here and not while serving. The
    kernel for truncated draws may be rejected by itself.

    Args:
        dtype: The type of the model's logits.
        vocabulary: The number of logits per row.
        makers: Makers of kernels; by default those of this device.
        seconds: Measures the duration of calls; by default on this device.
    """
    makers = makers_of_device(makers)
    if not makers:
        return Choice(MLX_PICKERS, "this device has no kernels")
    time_of = seconds or _seconds
    dtypes = list(dict.fromkeys((dtype, mx.float32)))
    pickers = Pickers(GumbelMax(makers[0]), TruncatedDraw(makers[0]))
    about = dtypes, vocabulary
    times: list[Seconds] = []

    def timed() -> list[Seconds]:
        if not times:
            times.extend(time_of(each, dtype, vocabulary) for each in (pickers, MLX_PICKERS))
        return times

    def plain() -> Choice[Pickers]:
        _compile(lambda logits, noise, _, masks: [pickers.plain(logits, each, masks) for each in (None, noise)], *about)
        if problem := wrong(pickers.plain, dtypes, vocabulary):
            raise Rejected(problem)
        ours, theirs = timed()
        figures = (
            f"{ours.greedy * 1e6:.0f} µs for {ROWS} greedy rows, MLX's operations take {theirs.greedy * 1e6:.0f}; "
            f"{ours.noisy * 1e6:.0f} and {theirs.noisy * 1e6:.0f} with noise"
        )
        if ours.greedy >= theirs.greedy or ours.noisy >= theirs.noisy:
            raise Rejected(f"slower: {figures}")
        return Choice(pickers, f"the kernels are faster: {figures}")

    def truncated(chosen: Choice[Pickers]) -> Choice[Pickers]:
        assert pickers.truncated is not None
        _compile(pickers.truncated, *about)
        if problem := wrong_truncated(pickers.truncated, dtypes, vocabulary):
            raise Rejected(problem)
        ours, theirs = (own.truncated * 1e6 for own in timed())
        if ours >= theirs:
            raise Rejected(f"slower: {ours:.0f} and {theirs:.0f} µs")
        return Choice(pickers, f"{chosen.reason}; {ours:.0f} and {theirs:.0f} with truncations")

    def by_mlx(reason: str) -> Choice[Pickers]:
        return Choice(MLX_PICKERS, f"the kernels are not used: {reason}")

    chosen = checked("the kernels that pick tokens", plain, by_mlx)
    if chosen.chosen is MLX_PICKERS:
        return chosen

    def without(reason: str) -> Choice[Pickers]:
        only = Pickers(pickers.plain)
        return Choice(only, f"{chosen.reason}; the kernel for truncated draws is not used: {reason}")

    return checked("the kernel for truncated draws", lambda: truncated(chosen), without)


def _compile(
    pick: Callable[[mx.array, Noise, Limits, Masks | None], object], dtypes: Iterable[mx.Dtype], vocabulary: int
) -> None:
    """Have all forms of a kernel compiled at once."""
    rng = np.random.default_rng(0)
    noise, masks = invent_draws(rng, vocabulary)
    noise, limits = _first(noise, _FEW), Limits(*(array[:_FEW] for array in invent_limits(rng, vocabulary)))

    def calls() -> None:
        for dtype, own in product(dtypes, (None, masks)):
            pick(mx.zeros((_FEW, vocabulary), dtype), noise, limits, own)

    dialect.compile_together(calls)


def described(choice: Choice[Pickers]) -> SamplingKernels:
    """Return a choice as plain data, from which `made` builds the same functions."""
    pickers = choice.chosen
    return SamplingKernels(choice.reason, pickers.plain is not MLX_PICKERS.plain, pickers.truncated is not None)


def made(given: SamplingKernels) -> Pickers:
    """Return the functions that another process chose."""
    if not given.plain:
        return MLX_PICKERS
    (make, *_) = makers_of_device(None)
    return Pickers(GumbelMax(make), TruncatedDraw(make) if given.truncated else None)


def wrong(pick: Pick, dtypes: Iterable[mx.Dtype], vocabulary: int) -> str:
    """Return what is wrong with the tokens picked from random logits; empty if nothing is."""
    rng = np.random.default_rng(0)
    noise, masks = invent_draws(rng, vocabulary)
    for dtype in dtypes:
        logits = mx.array(invent(rng, vocabulary)).astype(dtype)
        for noisy, masked, rows in ((0, 0, 52), (0, 0, 1), (1, 0, 52), (1, 1, 20), (0, 1, 20)):
            # `masks.places` is longer than the rows on purpose: in a buffer of the host, other numbers follow.
            problem = difference(pick, logits[:rows], _first(noise, rows) if noisy else None, masks if masked else None)
            if problem:
                return f"{problem} of {rows}, {dtype}"
    return ""


def wrong_once(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> str:
    """Return what is wrong with one call of each kernel among these functions; empty if nothing is."""
    rng = np.random.default_rng(2)
    noise, masks = invent_draws(rng, vocabulary)
    logits = mx.array(invent(rng, vocabulary)[:_FEW]).astype(dtype)
    if pickers.plain is MLX_PICKERS.plain:
        return ""
    if problem := difference(pickers.plain, logits, _first(noise, _FEW), masks):
        return f"{problem}, {dtype}"
    if pickers.truncated is None:
        return ""
    limits = Limits(*(array[:_FEW] for array in invent_limits(rng, vocabulary)))
    return difference_truncated(pickers.truncated, logits, _first(noise, _FEW), limits, None)


def difference(pick: Pick, logits: mx.array, noise: Noise | None, masks: Masks | None) -> str:
    """Return how the picked tokens differ from what numpy picks; empty if they do not."""
    with np.errstate(invalid="ignore"):  # some numbers are not finite
        sums, size = _sums(_allowed_logits(logits, masks), noise)
        got, want = np.array(pick(logits, noise, masks)), expected(sums)
        near = got == want
        if noise is not None:
            chosen = sums[np.arange(len(got)), np.clip(got, 0, None)]
            near |= (got >= 0) & (want >= 0) & (sums.max(-1) - chosen <= CLOSE * size)
    if near.all():
        return ""
    row = int(near.argmin())
    return f"token {got[row]} instead of {want[row]} in row {row}"


def wrong_truncated(pick: PickTruncated, dtypes: Iterable[mx.Dtype], vocabulary: int) -> str:
    """Return what is wrong with the tokens drawn among the likeliest of random logits; empty if nothing is."""
    rng = np.random.default_rng(1)
    noise, masks = invent_draws(rng, vocabulary)
    noise = noise._replace(temperature=mx.array(rng.choice(np.array([0.0, 1.0, 2.0, 9.0], np.float32), (52, 1))))
    for dtype in dtypes:
        logits = mx.array(invent(rng, vocabulary)[:20]).astype(dtype)
        for own, rows in ((None, 20), (None, 20), (None, 20), (masks, 20)):
            limits = Limits(*(array[:rows] for array in invent_limits(rng, vocabulary)))
            problem = difference_truncated(pick, logits[:rows], _first(noise, rows), limits, own)
            if problem:
                return f"{problem} of {rows}, {dtype}"
    return ""


def difference_truncated(
    pick: PickTruncated, logits: mx.array, noise: Noise, limits: Limits, masks: Masks | None
) -> str:
    """Return how the drawn tokens differ from what numpy draws among the likeliest; empty if they do not.

    The share of top-p may be a little larger or smaller than it should be, and sums may differ by rounding.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        numbers = _allowed_logits(logits, masks)
        sums, size = _sums(numbers, noise)
        got = np.array(pick(logits, noise, limits, masks))
        temperature, top_p, top_k, min_p = (np.array(each)[:, 0] for each in (noise.temperature, *limits))
        for row, token in enumerate(got):
            if not np.isfinite(numbers[row].max()):
                if token != NOT_A_NUMBER:
                    return f"token {token} instead of {NOT_A_NUMBER} in row {row}"
                continue
            if temperature[row] == 0.0:
                if token != numbers[row].argmax():
                    return f"token {token} instead of {numbers[row].argmax()} in row {row}"
                continue
            narrow, wide = (
                _kept(numbers[row], temperature[row], top_p[row], top_k[row], min_p[row], error)
                for error in (-SHARE, SHARE)
            )
            best = sums[row][narrow].max()
            if token < 0 or not wide[token] or best - sums[row, token] > CLOSE * size[row]:
                wanted = int(np.where(narrow, sums[row], -np.inf).argmax())
                return f"token {token} instead of {wanted} in row {row}"
    return ""


def _kept(
    numbers: Numbers, temperature: float, top_p: float, top_k: int, min_p: float, error: float
) -> npt.NDArray[np.bool_]:
    """Return which tokens the truncations keep, with this relative error of top-p's share and of min-p."""
    p = np.exp((numbers - numbers.max()) / temperature)
    kept: npt.NDArray[np.bool_] = (p >= min_p * (1 - error)) & np.isfinite(numbers)
    if not kept.any():
        kept = numbers == numbers.max()
    order = np.argsort(-numbers, kind="stable")
    ordered = numbers[order]
    if top_k < len(numbers):
        kept &= numbers >= ordered[top_k - 1]
    if top_p < 1.0:
        mass = np.where(kept, p, 0.0)
        before = np.concatenate([[0.0], np.cumsum(mass[order])])[np.searchsorted(-ordered, -ordered)]
        inside = np.empty(len(numbers), np.bool_)
        inside[order] = before < top_p * (1 + error) * mass.sum()
        inside[order[0]] = True
        kept &= inside
    return kept


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


def invent_limits(rng: np.random.Generator, vocabulary: int) -> Limits:
    """Return truncations for the rows of `invent`: one of them, or all together, from mild to strict."""
    kind = rng.integers(6, size=(52, 1))
    top_p = np.where((kind == 0) | (kind > 2), rng.choice([0.95, 0.5, 0.2, 1e-6], (52, 1)), 1.0)
    top_k = np.where((kind == 1) | (kind > 2), rng.choice([1, 2, 20, 40], (52, 1)), vocabulary)
    min_p = np.where((kind == 2) | (kind > 4), rng.choice([0.05, 0.5, 1.0], (52, 1)), 0.0)
    return Limits(
        mx.array(top_p.astype(np.float32)),
        mx.array(np.minimum(top_k, vocabulary).astype(np.int32)),
        mx.array(min_p.astype(np.float32)),
    )


def _first(noise: Noise, rows: int) -> Noise:
    """Return the noise of the first rows."""
    return Noise(*(array[:rows] for array in noise))


def _allowed_logits(logits: mx.array, masks: Masks | None) -> Numbers:
    """Return the logits [rows, vocabulary], -inf where the masks do not allow the token."""
    numbers: Numbers = np.array(logits.astype(mx.float32)).astype(np.float64)
    if masks is None:
        return numbers
    return np.where(np.array(bits_of(masks.of_rows(len(logits)), logits.shape[1])), numbers, -np.inf)


def _sums(numbers: Numbers, noise: Noise | None) -> tuple[Numbers, Numbers]:
    """Return the numbers [rows, vocabulary] of which the largest wins, and the size [rows] of the largest summand.

    numbers: as `_allowed_logits` returns them.
    """
    if noise is None:
        return numbers, np.ones(len(numbers))
    random = np.array(gumbel_noise(noise.key, noise.position, numbers.shape[1])).astype(np.float64)
    random *= np.array(noise.temperature)
    return numbers + random, np.maximum(_largest(numbers), _largest(random))


def _largest(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the largest absolute value of the finite numbers of each row."""
    largest: npt.NDArray[np.float64] = np.abs(np.where(np.isfinite(numbers), numbers, 0.0)).max(-1)
    return largest


def _seconds(pickers: Pickers, dtype: mx.Dtype, vocabulary: int) -> Seconds:
    """Return the seconds of one call on ROWS rows: greedy, with noise, and with noise and truncations."""
    logits = mx.random.normal((ROWS, vocabulary)).astype(dtype)
    noise = _first(invent_draws(np.random.default_rng(0), vocabulary)[0], ROWS)
    column = mx.ones((ROWS, 1))
    off = SamplingArrays(
        temperature=column,
        top_p=0.9 * column,
        top_k=mx.full((ROWS, 1), 20, mx.int32),
        min_p=0.0 * column,
        repetition=column,
        presence=0.0 * column,
        frequency=0.0 * column,
        key=noise.key,
        top_p_at=mx.arange(ROWS, dtype=mx.int32),
    )
    rounds = SamplingFlags.rounds_for(0.9)
    flags = SamplingFlags(noise=True, top_k=True, top_p_rounds=rounds, top_p_rows=ROWS)
    return Seconds(
        checking.seconds(lambda: [pickers.plain(logits, None, None)], CHAIN),
        checking.seconds(lambda: [pickers.plain(logits, noise, None)], CHAIN),
        checking.seconds(lambda: [sample(logits, noise.position, off, flags, None, pickers).tokens], CHAIN),
    )
