"""Batched sampling: one graph for all rows, every parameter per row, no sort of the vocabulary.

Tokens are drawn by Gumbel-max. The noise of a row depends on (seed, choice, position, token) alone, so that a draw does
not depend on the row's neighbours, on chunking or on preemption, and another model that samples with the same noise
tends to draw the same token.

Truncation follows vLLM's order: temperature, min-p, top-k, then top-p of the rest. XTC comes last and considers the
tokens that the other truncations left, at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_tandem.engine.plan import NOT_A_NUMBER
from mlx_tandem.model import backend
from mlx_tandem.model.inputs import arange
from mlx_tandem.model.ops.sampling.draw import Limits, Masks, Noise
from mlx_tandem.model.ops.sampling.masks import bits_of

_TOP_P_ROUNDS = ((0.9, 5), (0.8, 6), (0.5, 9), (0.05, 16), (0.0, 40))
"""Pairs (least top_p of the batch, rounds). A draw outside the nucleus is rejected together with all less likely
tokens, and another one is drawn from the rest, which is exact. The number of rejections is about Poisson with mean ln(1
/ top_p). More than these rounds have a probability under 1e-6, and then the likeliest token is taken.
"""


class SamplingFlags(NamedTuple):
    """The parts of sampling that a batch needs. Each has few values, since they are part of the key
    of a compiled step.
    """

    noise: bool = False
    min_p: bool = False
    top_k: bool = False
    top_p_rounds: int = 0  # 0: no row has a top_p
    top_p_rows: int = 0  # number of rows with a top_p, padded
    penalties: bool = False
    bias: bool = False
    min_tokens: bool = False
    allowed: bool = False
    xtc: bool = False
    window: bool = False  # whether a row's repetition penalty counts only its last tokens
    logprobs: int = -1  # -1: none; 0: the drawn token's; k: also those of the k likeliest tokens

    @property
    def adjusts(self) -> bool:
        """Whether a row has penalties, a bias or a least number of tokens."""
        return self.penalties or self.bias or self.min_tokens

    @property
    def truncates(self) -> bool:
        """Whether a row restricts its candidates by min-p, top-k, top-p or XTC."""
        return self.min_p or self.top_k or self.xtc or self.top_p_rounds > 0

    @staticmethod
    def rounds_for(least_top_p: float) -> int:
        """Return the rounds for a batch whose least top_p is this; 0 when no row has a top_p."""
        if least_top_p >= 1.0:
            return 0
        return next(rounds for bound, rounds in _TOP_P_ROUNDS if least_top_p >= bound)


_COLUMNS = ("temperature", "top_p", "top_k", "min_p", "repetition", "presence", "frequency", "key", "top_p_at")
_OPTIONAL = {
    "bias": ("bias",),
    "min_tokens": ("min_until", "stops"),
    "allowed": ("allowed",),
    "xtc": ("xtc_probability", "xtc_threshold", "xtc_kept"),
    "window": ("window",),
}
"""Names of the arrays that are present when the flag of this name is set, in this order."""


@dataclass(frozen=True, slots=True)
class SamplingArrays:
    """The sampling parameters of the rows, column vectors [rows, 1] unless noted.

    Arrays that may be None are present where the flags ask for them.
    """

    temperature: mx.array
    top_p: mx.array
    top_k: mx.array  # int32; the size of the vocabulary where off
    min_p: mx.array
    repetition: mx.array
    presence: mx.array
    frequency: mx.array
    key: mx.array  # [rows, 2] uint32, from `row_key`
    top_p_at: mx.array  # [top_p_rows] int32: the rows that have a top_p; padding repeats one of them
    bias: mx.array | None = None  # [rows, vocabulary]
    min_until: mx.array | None = None  # int32: before this position …
    stops: mx.array | None = None  # [rows, vocabulary] bool: … none of these is drawn
    allowed: mx.array | None = None  # [rows, words] uint32, a bit for each token: only these are drawn
    xtc_probability: mx.array | None = None  # 0 where off
    xtc_threshold: mx.array | None = None
    xtc_kept: mx.array | None = None  # [rows, vocabulary] bool: these are never left out
    window: mx.array | None = None  # int32: tokens that the repetition penalty counts; 0: all

    def flatten(self) -> list[mx.array]:
        """Return the arrays that are present, for `unflatten`."""
        arrays = [getattr(self, name) for name in (*_COLUMNS, *(n for names in _OPTIONAL.values() for n in names))]
        return [a for a in arrays if a is not None]

    @staticmethod
    def unflatten(arrays: list[mx.array], flags: SamplingFlags) -> SamplingArrays:
        """Return the parameters that `flatten` made these arrays of, for a batch with these flags."""
        names = [*_COLUMNS, *(n for flag, names in _OPTIONAL.items() if getattr(flags, flag) for n in names)]
        return SamplingArrays(**dict(zip(names, arrays, strict=True)))


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The drawn tokens [rows] int32, NOT_A_NUMBER where the logits were not finite, and the
    logprobs that are wanted.
    """

    tokens: mx.array
    model_logprob: mx.array | None = None  # [rows]
    sampled_logprob: mx.array | None = None  # [rows]
    top_tokens: mx.array | None = None  # [rows, k]
    top_logprobs: mx.array | None = None

    def flatten(self) -> list[mx.array]:
        """Return the arrays that are present, the tokens first."""
        optional = (self.model_logprob, self.sampled_logprob, self.top_tokens, self.top_logprobs)
        return [self.tokens, *(a for a in optional if a is not None)]


Pick = Callable[[mx.array, Noise | None, Masks | None], mx.array]
"""A function that takes logits [rows, vocabulary] and returns tokens [rows] int32.

For each row it picks the first allowed token with the largest logit + temperature * noise; without noise, with the
largest logit. The token is NOT_A_NUMBER where the largest number is not finite or an allowed token's number is NaN.
"""

PickTruncated = Callable[[mx.array, Noise, Limits, Masks | None], mx.array]
"""A `Pick` with noise among the tokens that min-p, top-k and top-p keep, in this order."""

_MASK = (1 << 64) - 1


def row_key(seed: int, choice: int) -> tuple[int, int]:
    """Return two 32-bit words made of a request's seed and the index of the choice (SplitMix64's finaliser, twice)."""
    z = seed & _MASK
    for salt in (0x9E3779B97F4A7C15, choice * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D):
        z = (z + salt) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def _mix(h: mx.array) -> mx.array:
    """Return a bijection of 32-bit words in which every input bit affects every output bit
    (MurmurHash3's finaliser).
    """
    h = (h ^ (h >> 16)) * mx.array(0x85EBCA6B, mx.uint32)
    h = (h ^ (h >> 13)) * mx.array(0xC2B2AE35, mx.uint32)
    return h ^ (h >> 16)


_NO_TOKEN = 0x61C8864F
"""Word of the token 2^32 - 1, which no vocabulary has."""


@lru_cache(maxsize=8)
def _token_words(vocabulary: int) -> mx.array:
    """Return [1, vocabulary] uint32, one word for each token; a constant of the graph."""
    return mx.array((np.arange(vocabulary, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF).astype(np.uint32)[None])


def _uniform(key: mx.array, position: mx.array, words: mx.array) -> mx.array:
    """Return [rows, words] float32 from 2^-33 to 1, a pure function of (key, position, word)."""
    p = position.astype(mx.uint32)[:, None] * mx.array(0x9E3779B9, mx.uint32)
    first = _mix(key[:, :1] ^ _mix(p + 0x7F4A7C15))
    second = _mix(key[:, 1:] + _mix(p ^ 0x94D049BB))
    bits = _mix(_mix(words ^ first) + second)
    return bits.astype(mx.float32) * 2.0**-32 + 2.0**-33


def xtc_draw(key: mx.array, position: mx.array) -> mx.array:
    """Return [rows, 1] float32, uniform from 2^-33 to 1 and independent of the row's Gumbel noise.

    XTC applies to a row where this is at most the row's XTC probability.
    """
    return _uniform(key, position, mx.array([[_NO_TOKEN]], mx.uint32))


def gumbel_noise(key: mx.array, position: mx.array, vocabulary: int) -> mx.array:
    """Return standard Gumbel noise [rows, vocabulary] float32, a pure function of (key, position, token).

    key: [rows, 2] uint32; position: [rows] int32.
    """
    u = _uniform(key, position, _token_words(vocabulary))
    # -log(1 - u) loses precision for small u, by which likely tokens win; the series there is exact to float32.
    # (log1p is three times slower on a CPU.)
    exponential = mx.where(u < 1e-3, u * (1.0 + u * (0.5 + u / 3.0)), -mx.log(mx.maximum(1.0 - u, 1e-30)))
    return -mx.log(exponential)


class Pickers(NamedTuple):
    """The functions that pick tokens.

    Attributes:
        plain: Picks among all tokens.
        truncated: Picks among the likeliest tokens; None: MLX's own operations do.
    """

    plain: Pick
    truncated: PickTruncated | None = None


def pick_with_mlx(logits: mx.array, noise: Noise | None = None, masks: Masks | None = None) -> mx.array:
    """Return the tokens [rows] that are picked by MLX's own operations; a `Pick` for every device."""
    if masks is not None:
        logits = _masked(logits, masks)
    if noise is not None:
        logits = _perturbed(logits, noise)
    return _checked(mx.argmax(logits, -1), logits.max(-1, keepdims=True))


MLX_PICKERS = Pickers(pick_with_mlx)
"""The functions for a device without kernels."""


def _masked(logits: mx.array, masks: Masks) -> mx.array:
    """Return the logits, -inf where the masks do not allow the token."""
    return mx.where(bits_of(masks.of_rows(len(logits)), logits.shape[-1]), logits, -mx.inf)


def _perturbed(logits: mx.array, noise: Noise) -> mx.array:
    """Return logits + temperature * Gumbel noise, [rows, vocabulary] float32. The largest one's token is drawn."""
    return logits + noise.temperature * gumbel_noise(noise.key, noise.position, logits.shape[-1])


def sample(
    logits: mx.array,
    position: mx.array,
    a: SamplingArrays,
    flags: SamplingFlags,
    seen: TokenCounts | None,
    pickers: Pickers = MLX_PICKERS,
    masks: Masks | None = None,
) -> SamplerOutput:
    """Draw one token for each row.

    logits: [rows, vocabulary]; position: [rows] int32, the positions of the tokens to be drawn; seen: the rows' token
    counts, needed for penalties; masks: the only tokens that the rows may draw, None for all.
    """
    noise = Noise(a.key, position, a.temperature) if flags.noise else None
    z = _adjusted(logits, position, a, flags, seen)
    if a.allowed is not None:
        allowed = Masks(arange(len(logits)), a.allowed)
        if masks is None:
            masks = allowed
        else:
            z = _masked(z, allowed)
    if flags.logprobs < 0 and not flags.xtc:
        if not flags.truncates:
            return SamplerOutput(pickers.plain(z, noise, masks))
        if pickers.truncated is not None and noise is not None:
            return SamplerOutput(pickers.truncated(z, noise, Limits(a.top_p, a.top_k, a.min_p), masks))
    raw, z = logits.astype(mx.float32), z.astype(mx.float32)
    if masks is not None:
        z = _masked(z, masks)
    peak = z.max(-1, keepdims=True)
    is_greedy = a.temperature == 0.0
    scaled = (z - peak) / mx.where(is_greedy, 1.0, a.temperature)
    p = backend.current().exp(scaled)  # evaluated only where something below asks for it
    sums = z
    if noise is not None:
        sums = everything = _perturbed(z, noise)
        if flags.min_p or flags.top_k:
            p = _keep_likely(p, a, flags)
            sums = mx.where(p > 0.0, sums, -mx.inf)
        if flags.xtc:
            assert a.xtc_probability is not None
            kept, left = _exclude_top_choices(scaled, z - peak, p, a, flags)
            applies = xtc_draw(a.key, position) <= a.xtc_probability
            sums = mx.where(applies, mx.where(left, everything, -mx.inf), sums)
    tokens = mx.argmax(sums, -1)
    if flags.top_p_rounds:
        tokens = _within_top_p(sums, p, tokens, a, flags)
    if flags.logprobs < 0:
        return SamplerOutput(_checked(tokens, peak))
    normaliser = mx.logsumexp(raw, -1, keepdims=True)
    chosen = tokens[:, None]
    model = mx.take_along_axis(raw, chosen, -1) - normaliser
    mass = mx.where(_nucleus(p, a), p, 0.0).sum(-1, keepdims=True) if flags.top_p_rounds else p.sum(-1, keepdims=True)
    sampled = mx.log(mx.take_along_axis(p, chosen, -1) / mass)
    if flags.xtc:
        assert a.xtc_probability is not None
        sampled = mx.where(a.xtc_probability > 0.0, _xtc_logprob(scaled, kept, left, chosen, a), sampled)
    sampled = mx.where(is_greedy, 0.0, sampled)
    k = flags.logprobs
    if k == 0:
        return SamplerOutput(_checked(tokens, peak), model[:, 0], sampled[:, 0])
    return SamplerOutput(_checked(tokens, peak), model[:, 0], sampled[:, 0], *_likeliest(raw, normaliser, k))


def _adjusted(
    logits: mx.array, position: mx.array, a: SamplingArrays, flags: SamplingFlags, seen: TokenCounts | None
) -> mx.array:
    """Return the logits with penalties, bias and, before a row has its least number of tokens, -inf for what stops it.

    The result is float32. If no flag asks for a change, the given logits are returned in their own type, uncopied.
    """
    if not flags.adjusts:
        return logits
    z = logits.astype(mx.float32)
    if flags.penalties:
        assert seen is not None
        z = seen.penalise(z, a)
    if a.bias is not None:
        z = z + a.bias
    if flags.min_tokens:
        assert a.stops is not None
        assert a.min_until is not None
        z = mx.where(a.stops & (position[:, None] < a.min_until), -mx.inf, z)
    return z


def score(logits: mx.array, targets: mx.array, k: int) -> list[mx.array]:
    """Return logprob and rank of each target and, with k, the k likeliest tokens and their logprobs.

    They are those of the model's own distribution. logits: [rows, length, vocabulary]; targets: [rows, length] int32.
    """
    raw = logits.astype(mx.float32)
    normaliser = mx.logsumexp(raw, -1, keepdims=True)
    target = mx.take_along_axis(raw, targets[..., None], -1)
    rank = (raw > target).sum(-1) + 1
    scored = [(target - normaliser)[..., 0], rank]
    return [*scored, *_likeliest(raw, normaliser, k)] if k else scored


def _likeliest(raw: mx.array, normaliser: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k likeliest tokens of logits […, vocabulary], best first, and their logprobs, […, k] each."""
    top = mx.argpartition(-raw, k - 1, -1)[..., :k]
    logprobs = mx.take_along_axis(raw, top, -1) - normaliser
    order = mx.argsort(-logprobs, -1)
    return mx.take_along_axis(top, order, -1), mx.take_along_axis(logprobs, order, -1)


def _checked(tokens: mx.array, peak: mx.array) -> mx.array:
    """Return the tokens as int32, NOT_A_NUMBER in rows whose largest logit is not finite."""
    return mx.where(mx.isfinite(peak[:, 0]), tokens.astype(mx.int32), NOT_A_NUMBER)


def _keep_likely(p: mx.array, a: SamplingArrays, flags: SamplingFlags) -> mx.array:
    """Return p [rows, vocabulary], relative to the peak's 1, with 0 for the tokens that min-p and top-k cut away."""
    if flags.min_p:
        p = mx.where(p >= a.min_p, p, 0.0)
    if flags.top_k:
        # The k-th largest p is the highest threshold that at least k tokens reach.
        threshold = _highest(p, lambda t: (p >= t).sum(-1, keepdims=True) >= a.top_k)
        p = mx.where(p >= threshold, p, 0.0)
    return p


def kept(p: mx.array, top_p: mx.array, top_k: mx.array, min_p: mx.array) -> mx.array:
    """Return [rows, vocabulary] bool: the tokens that a draw with this truncation may take.

    p: [rows, vocabulary], relative to the peak's 1; the others [rows, 1], top_k the size of the vocabulary where off.
    """
    p = mx.where(p >= min_p, p, 0.0)
    p = mx.where(p >= _highest(p, lambda t: (p >= t).sum(-1, keepdims=True) >= top_k), p, 0.0)
    most = top_p * p.sum(-1, keepdims=True)
    nucleus = p >= _highest(p, lambda t: mx.where(p >= t, p, 0.0).sum(-1, keepdims=True) >= most)
    return (p > 0.0) & nucleus


def _within_top_p(sums: mx.array, p: mx.array, tokens: mx.array, a: SamplingArrays, flags: SamplingFlags) -> mx.array:
    """Return the tokens [rows], redrawn within the nucleus in rows that have a top_p.

    The nucleus is the smallest set of likeliest tokens that holds top_p of the mass. sums: [rows, vocabulary], whose
    largest number in a row is the drawn token's.
    """
    at, some = a.top_p_at, flags.top_p_rows < p.shape[0]
    top_p, drawn = a.top_p, tokens
    if some:
        sums, p, top_p, drawn = sums[at], p[at], top_p[at], tokens[at]
    most = top_p * p.sum(-1, keepdims=True)
    own = _rounds(top_p[:, 0])  # a row's rounds do not depend on other rows' top_p
    for i in range(flags.top_p_rounds):
        p_drawn = mx.take_along_axis(p, drawn[:, None], -1)
        inside = mx.where(p > p_drawn, p, 0.0).sum(-1, keepdims=True) < most
        if i + 1 < flags.top_p_rounds:
            # A row whose token is inside keeps its candidates, and so its token.
            sums = mx.where(inside | (p > p_drawn), sums, -mx.inf)
            again = mx.argmax(sums, -1)
            drawn = again if i + 1 < _TOP_P_ROUNDS[0][1] else mx.where(i + 1 < own, again, drawn)
    drawn = mx.where(inside[:, 0], drawn, mx.argmax(p, -1))
    if some:
        tokens[at] = drawn
        return tokens
    return drawn


def _rounds(top_p: mx.array) -> mx.array:
    """Return the rounds [rows] of rows with these top_p, as `SamplingFlags.rounds_for` does for one row."""
    rounds = mx.full(top_p.shape, _TOP_P_ROUNDS[-1][1], mx.int32)
    for bound, own in reversed(_TOP_P_ROUNDS[:-1]):
        rounds = mx.where(top_p >= bound, own, rounds)
    return rounds


def _nucleus(p: mx.array, a: SamplingArrays) -> mx.array:
    """Return [rows, vocabulary] bool: the smallest set of likeliest tokens that holds top_p of the mass of p."""
    most = a.top_p * p.sum(-1, keepdims=True)
    return p >= _highest(p, lambda t: mx.where(p >= t, p, 0.0).sum(-1, keepdims=True) >= most)


def _exclude_top_choices(
    scaled: mx.array, z: mx.array, p: mx.array, a: SamplingArrays, flags: SamplingFlags
) -> tuple[mx.array, mx.array]:
    """Return two [rows, vocabulary] bool: the tokens that the other truncations leave, and those of them that XTC
    leaves when it applies to a row.

    XTC, "exclude top choices", removes the tokens over its threshold, all but the least likely of them. As in mlx-lm,
    the threshold is compared with probabilities at temperature 1. scaled: logits over the temperature, less their peak;
    z: the same at temperature 1; p: relative probabilities after min-p and top-k.
    """
    assert a.xtc_threshold is not None
    assert a.xtc_kept is not None
    # A low temperature makes p 0 for tokens that no truncation removed and that are likely once others are removed.
    kept = (p > 0.0) | ((a.min_p <= 0.0) & (a.top_k >= p.shape[-1]))
    if flags.top_p_rounds:
        kept = kept & (_nucleus(p, a) | (a.top_p >= 1.0))
    weight = mx.where(kept, backend.current().exp(z), 0.0)
    share = weight / weight.sum(-1, keepdims=True)
    least = mx.where(share > a.xtc_threshold, share, mx.inf).min(-1, keepdims=True)
    return kept, kept & ((share <= least) | a.xtc_kept)


def _xtc_logprob(scaled: mx.array, kept: mx.array, left: mx.array, chosen: mx.array, a: SamplingArrays) -> mx.array:
    """Return [rows, 1]: the logprob of `chosen`, averaged over whether XTC applies to the row."""
    assert a.xtc_probability is not None
    own = mx.take_along_axis(scaled, chosen, -1)
    total, rest = (mx.logsumexp(mx.where(m, scaled, -mx.inf), -1, keepdims=True) for m in (kept, left))
    without = (1.0 - a.xtc_probability) * mx.exp(own - total)
    return mx.log(without + a.xtc_probability * mx.where(mx.take_along_axis(left, chosen, -1), mx.exp(own - rest), 0.0))


def _highest(p: mx.array, holds) -> mx.array:  # type: ignore[no-untyped-def]
    """Return [rows, 1]: the largest float32 t in [0, 1] for which `holds(t)`, which must hold at 0 and be monotone.

    Non-negative floats are ordered as their bits are, so 30 halvings of the range of bits are exact.
    """
    low = mx.zeros((p.shape[0], 1), mx.int32)
    for step in mx.split(_halvings(), 30):
        middle = low + step
        ok = holds(middle.view(mx.float32)) & (middle <= 0x3F800000)
        low = mx.where(ok, middle, low)
    return low.view(mx.float32)


@cache
def _halvings() -> mx.array:
    """Return the powers of two from 2^29 down to 1 as one array.

    Each number that stands in a graph by itself would make a kernel of its own, compiled at its first use.
    """
    return mx.array(1 << np.arange(29, -1, -1, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """How often each token occurs in the prompt and the output of each row, for penalties.

    prompt: [rows, vocabulary] bool; output: [rows, vocabulary] counts; recent: [rows, length] int32, the last tokens,
    the newest at the end and -1 before the first, where a row has a window.
    """

    prompt: mx.array
    output: mx.array
    recent: mx.array | None = None

    @staticmethod
    def of(seats: list[mx.array], rows: mx.array) -> TokenCounts | None:
        """Return the counts of these rows (seats [rows] int32) from the arrays of all seats; None without arrays."""
        return TokenCounts(*(array[rows] for array in seats)) if seats else None

    def behind(self, drafts: mx.array) -> TokenCounts:
        """Return the counts after these drafts [rows, most] int32, -1 after the last draft of a row."""
        real = drafts >= 0
        output = self.output.at[mx.arange(len(drafts))[:, None], mx.maximum(drafts, 0)].add(real.astype(mx.float32))
        if self.recent is None:
            return TokenCounts(self.prompt, output)
        place = mx.arange(self.recent.shape[1])[None] + real.sum(1, keepdims=True)
        recent = mx.take_along_axis(mx.concatenate([self.recent, drafts], 1), place, 1)
        return TokenCounts(self.prompt, output, recent)

    def after(
        self, seats: list[mx.array], rows: mx.array, tokens: mx.array, newest: mx.array | None = None
    ) -> list[mx.array]:
        """Return the arrays of all seats that change when the rows draw these tokens [rows] int32.

        newest: the seats [rows] of rows that draw their sequence's newest token, and the padding seat for other rows;
        None: as `rows`.
        """
        counts = [seats[1].at[rows, tokens].add(1.0)]
        if self.recent is None:
            return counts
        recent = mx.concatenate([self.recent[:, 1:], tokens[:, None]], 1)
        seats[2][rows if newest is None else newest] = recent
        return [*counts, seats[2]]

    def penalise(self, z: mx.array, a: SamplingArrays) -> mx.array:
        """Return the logits z [rows, vocabulary] with the rows' penalties.

        The repetition penalty divides positive and multiplies negative logits of tokens that occur anywhere (CTRL,
        Keskar et al. 2019), or among the last `a.window`. Presence and frequency penalties are subtracted for tokens
        of the output (OpenAI's definition).
        """
        said = self.output > 0
        counted = self.prompt | said
        if self.recent is not None and a.window is not None:
            counted = counted & (a.window == 0)
            z = _penalise_recent(z, self.recent, a.repetition, a.window)
        scale = mx.where(z > 0, 1.0 / a.repetition, a.repetition)
        z = mx.where(counted, z * scale, z)
        return z - a.frequency * self.output - a.presence * said


def _penalise_recent(z: mx.array, recent: mx.array, penalty: mx.array, window: mx.array) -> mx.array:
    """Return z [rows, vocabulary] with the repetition penalty on the last `window` tokens of rows that have a window.

    It applies once to each token, however often the token occurs.
    """
    age = mx.arange(recent.shape[1] - 1, -1, -1)[None]  # of each token; 0 is the newest
    newest = mx.maximum(recent[:, -1:], 0)  # stands in for tokens that do not count; it counts anyway
    tokens = mx.where((age < window) & (recent >= 0), recent, newest)
    logits = mx.take_along_axis(z, tokens, -1)
    scaled = logits * mx.where(logits > 0, 1.0 / penalty, penalty)
    return mx.put_along_axis(z, tokens, mx.where(window > 0, scaled, logits), -1)
