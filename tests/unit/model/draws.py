"""Draws of the sampler through the same seats as in the engine, and the distribution that they have to follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import Seating
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers, SamplerOutput, TokenCounts, gumbel_noise, sample
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.types import SamplingParams

Array = np.ndarray[Any, Any]
VOCAB = 40
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 2.0, VOCAB).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One row: how it samples, what it has met, where it is."""

    params: SamplingParams
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    choice: int = 0
    position: int = 1
    stop_ids: frozenset[int] = frozenset()


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, **changes})


def draw(logits: Array, cases: Sequence[Case], vocab: int = VOCAB, pickers: Pickers = MLX_PICKERS) -> SamplerOutput:
    """One batch, through the same seats as in the engine. `logits`: of all rows, or of each."""
    seats = Seats(len(cases), vocab)
    for i, c in enumerate(cases):
        seats.take(Seating(i, c.params, c.choice, len(c.prompt), c.prompt + c.output, c.stop_ids))
    indices = tuple(range(len(cases)))
    flags = seats.flags(indices)
    seen = TokenCounts.of(seats.seen(flags), mx.array(indices))
    batch = np.broadcast_to(logits, (len(cases), vocab)).astype(np.float32)
    position = mx.array([c.position for c in cases], mx.int32)
    return sample(mx.array(batch), position, seats.arrays(indices, flags), flags, seen, pickers)


def tokens(logits: Array, cases: Sequence[Case], vocab: int = VOCAB) -> list[int]:
    return list(listed(draw(logits, cases, vocab).tokens))


def listed(array: mx.array | None) -> Any:
    assert array is not None
    return array.tolist()


# --- the oracle --------------------------------------------------------------------------------------------------


def distribution(logits: Array, case: Case) -> Array:
    """What is drawn from, in float64: penalties, allowed tokens and bias, temperature, min-p, top-k, top-p and XTC, in
    this order."""
    p = case.params
    z = logits.astype(np.float64).copy()
    counts = np.bincount(case.output, minlength=len(z)) if case.output else np.zeros(len(z))
    history = case.prompt + case.output
    met = np.bincount(history[-p.repetition_context :], minlength=len(z)) > 0
    z[met] = np.where(z[met] > 0, z[met] / p.repetition_penalty, z[met] * p.repetition_penalty)
    z -= p.frequency_penalty * counts + p.presence_penalty * (counts > 0)
    for token, bias in p.logit_bias:
        z[token] += bias
    if p.allowed_token_ids:
        z[np.setdiff1d(np.arange(len(z)), p.allowed_token_ids)] = -np.inf
    if p.greedy:
        return (np.arange(len(z)) == z.argmax()).astype(np.float64)
    w = np.exp((z - z.max()) / p.temperature)
    w[w < p.min_p] = 0.0
    order = np.argsort(-w, kind="stable")
    if p.top_k:
        w[order[p.top_k :]] = 0.0
    w /= w.sum()
    before = np.cumsum(w[order]) - w[order]
    w[order[before >= p.top_p]] = 0.0
    left = np.where(top_choices(z, w > 0, p), 0.0, w)
    return (1 - p.xtc_probability) * w / w.sum() + p.xtc_probability * left / left.sum()


def top_choices(z: Array, kept: Array, p: SamplingParams) -> Array:
    """Return the tokens that XTC leaves out: those over the threshold at temperature 1, but for the least likely."""
    share = np.where(kept, np.exp(z - z.max()), 0.0)
    share /= share.sum()
    above = share > p.xtc_threshold
    out = above & (share > share[above].min(initial=np.inf))
    out[list(p.xtc_kept)] = False
    return out


def assert_follows(drawn: Sequence[int], p: Array) -> None:
    """Pearson's chi-square over the tokens expected often enough; never one that is excluded."""
    counts = np.bincount(drawn, minlength=len(p))
    assert counts[p == 0].sum() == 0, "a token outside of the truncation was drawn"
    expected = p * len(drawn)
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    if degrees == 0:
        return
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    # Wilson and Hilferty's approximation of the quantile at 4.5 standard deviations, about 1 in 300,000.
    bound = degrees * (1 - 2 / (9 * degrees) + 4.5 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} with {degrees} degrees of freedom, over {bound:.1f}"


TRUNCATIONS = {
    "plain": params(),
    "cool": params(temperature=0.5),
    "hot": params(temperature=2.0),
    "top_k 1": params(top_k=1),
    "top_k 5": params(top_k=5),
    "top_k over the vocabulary": params(top_k=1000),
    "top_p 0.9": params(top_p=0.9),
    "top_p 0.5": params(top_p=0.5),
    "top_p 0.1": params(top_p=0.1),
    "top_p tiny": params(top_p=1e-6),
    "min_p 0.1": params(min_p=0.1),
    "min_p 1": params(min_p=1.0),
    "all": params(temperature=1.3, top_k=12, top_p=0.85, min_p=0.02),
    "top_k and top_p": params(temperature=0.8, top_k=6, top_p=0.7),
    "min_p and top_p, hot": params(temperature=2.0, min_p=0.05, top_p=0.6),
    "penalties": params(repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.4),
    "bias": params(logit_bias=((3, 4.0), (7, -100.0))),
    "repetition in a window": params(repetition_penalty=1.8, repetition_context=4),
    "a window, and penalties of the output": params(
        repetition_penalty=0.6, repetition_context=7, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "a window longer than all tokens": params(repetition_penalty=1.8, repetition_context=600),
    "allowed": params(allowed_token_ids=(3, 5, 7, 9, 39), logit_bias=((3, 4.0),)),
    "allowed and truncated": params(allowed_token_ids=tuple(range(0, 40, 2)), top_k=7, top_p=0.8),
    "xtc": params(xtc_probability=0.5, xtc_threshold=0.05),
    "xtc always": params(xtc_probability=1.0, xtc_threshold=0.12),
    "xtc, cool": params(xtc_probability=0.7, xtc_threshold=0.02, temperature=0.5),
    "xtc, hot": params(xtc_probability=0.7, xtc_threshold=0.05, temperature=1.7, min_p=0.05),
    "xtc of a nucleus": params(xtc_probability=0.6, xtc_threshold=0.1, top_p=0.8, top_k=12),
    "xtc that leaves nothing out": params(xtc_probability=1.0, xtc_threshold=0.6),
    "xtc with tokens that stay": params(
        xtc_probability=0.8, xtc_threshold=0.03, xtc_kept=tuple(np.argsort(-LOGITS)[[0, 2]].tolist())
    ),
    "everything": params(
        temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=0.8, presence_penalty=-0.5,
        frequency_penalty=0.3, logit_bias=((3, 2.0), (11, -2.0)),
    ),
}  # fmt: skip
PROMPT, OUTPUT = (1, 2, 3, 4, 5, 2), (3, 9, 9, 9, 12)


def uniform(keys: Sequence[tuple[int, int]], positions: Sequence[int], vocab: int) -> Array:
    g = gumbel_noise(mx.array(np.array(keys, np.uint32)), mx.array(list(positions), mx.int32), vocab)
    return np.exp(-np.exp(-np.array(g).astype(np.float64)))
