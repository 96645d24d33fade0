"""The sampling state of each seat, and the arrays made of it for a set of rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_tandem.engine.plan import Row, RowKind, Seating, mask_words
from mlx_tandem.model.ops.sampling.sampler import SamplingArrays, SamplingFlags, row_key
from mlx_tandem.model.shapes import coarse_count, row_count

_FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
_XTC = ("xtc_probability", "xtc_threshold")

KEPT_SAMPLING = 4
"""Most sets of seats whose sampling arrays are kept: those of a step's parts. Some are as wide as the vocabulary."""


class Seats:
    """The sampling state of `num_seats` seats, and of one more, the last, for padded rows, which samples greedily."""

    def __init__(self, num_seats: int, vocab_size: int):
        self.padding = num_seats
        self._vocab_size = vocab_size
        n = num_seats + 1
        self._values = {name: np.zeros(n, np.float32) for name in (*_FLOATS, *_XTC)}
        self._values["top_p"][:] = 1.0
        self._values["repetition"][:] = 1.0
        self._top_k = np.full(n, vocab_size, np.int32)
        self._logprobs = np.full(n, -1, np.int32)
        self._prompt_logprobs = np.full(n, -1, np.int32)
        self._keys = np.zeros((n, 2), np.uint32)
        self._bias: dict[int, tuple[tuple[int, float], ...]] = {}
        self._stops: dict[int, tuple[int, frozenset[int]]] = {}  # (position, tokens that are not drawn before it)
        self._allowed: dict[int, tuple[int, ...]] = {}
        self._most = [0] * n  # tokens of the sequence, prompt and output together
        self._xtc_kept: dict[int, tuple[int, ...]] = {}
        self._counts = np.zeros(n, np.bool_)  # which seats have a penalty
        self._window = np.zeros(n, np.int32)  # of the repetition penalty; 0: all tokens
        self.generation = 0
        """Number that changes whenever a seat changes: arrays made before are stale."""
        self._recent_sampling: OrderedDict[Any, tuple[SamplingFlags, list[mx.array]]] = OrderedDict()
        self.prompt_seen: mx.array | None = None  # [seats, vocabulary] bool, made when a penalty first needs it
        self.output_count: mx.array | None = None  # [seats, vocabulary] float32
        self.recent: mx.array | None = None  # [seats, length] int32 as in `TokenCounts`, made for the first window

    def no_tokens(self) -> mx.array:
        """Return a number for each seat, all 0: its newest token, or where that is."""
        tokens = mx.zeros((self.padding + 1,), mx.int32)
        mx.eval(tokens)
        return tokens

    def take(self, seating: Seating) -> None:
        """Give a seat to a sequence."""
        p, i = seating.params, seating.seat
        self.generation += 1
        v = self._values
        v["temperature"][i] = 0.0 if p.greedy else p.temperature
        v["top_p"][i] = 1.0 if p.greedy else p.top_p
        v["min_p"][i] = 0.0 if p.greedy else p.min_p
        v["repetition"][i] = p.repetition_penalty
        v["presence"][i] = p.presence_penalty
        v["frequency"][i] = p.frequency_penalty
        v["xtc_probability"][i] = 0.0 if p.greedy else p.xtc_probability
        v["xtc_threshold"][i] = p.xtc_threshold
        self._most[i] = seating.prompt_length + p.max_tokens
        self._window[i] = p.repetition_context if p.repetition_penalty != 1.0 else 0
        self._top_k[i] = p.top_k if 0 < p.top_k < self._vocab_size and not p.greedy else self._vocab_size
        self._logprobs[i] = -1 if p.logprobs is None else p.logprobs
        self._prompt_logprobs[i] = -1 if p.prompt_logprobs is None else p.prompt_logprobs
        self._keys[i] = row_key(p.seed, seating.choice)
        for kept in (self._bias, self._stops, self._allowed, self._xtc_kept):
            kept.pop(i, None)
        if p.logit_bias:
            self._bias[i] = p.logit_bias
        if p.allowed_token_ids:
            self._allowed[i] = p.allowed_token_ids
        if p.xtc_kept:
            self._xtc_kept[i] = p.xtc_kept
        if p.min_tokens and seating.stop_ids:
            self._stops[i] = seating.prompt_length + p.min_tokens, seating.stop_ids
        self._counts[i] = p.counts_tokens
        if p.counts_tokens:
            self._count(seating)

    def near_end(self, rows: Sequence[Row]) -> bool:
        """Return whether a sequence that decodes may have room for fewer tokens in its next row than in this one."""
        decoding = (row for row in rows if row.kind is not RowKind.PROMPT)
        return any(self._most[row.seat] - (row.start + 1) < 2 * len(row.tokens) for row in decoding)

    def reset(self) -> None:
        """Drop the token counts of all seats and all sampling arrays; sequences take their seats again before they
        continue.
        """
        self.prompt_seen = self.output_count = self.recent = None
        self._recent_sampling.clear()

    def sampling(self, seats: tuple[int, ...], *, coarse: bool) -> tuple[SamplingFlags, list[mx.array]]:
        """Return sampling flags and arrays of these seats, which are made anew only when a seat changes.

        coarse: whether the rows that have a top_p are padded as in mixed steps.
        """
        key = (self.generation, seats, coarse)
        made = self._recent_sampling.get(key)
        if made is None:
            flags = self.flags(seats, coarse_count if coarse else row_count)
            made = self._recent_sampling[key] = flags, self.arrays(seats, flags).flatten()
            if len(self._recent_sampling) > KEPT_SAMPLING:
                self._recent_sampling.popitem(last=False)
        self._recent_sampling.move_to_end(key)
        return made

    def flags(self, seats: Sequence[int], padded: Callable[[int], int] = row_count) -> SamplingFlags:
        """Return what a step with these seats needs. `padded` pads the number of rows that have a top_p."""
        at = np.asarray(seats)
        v = self._values
        top_p = v["top_p"][at]
        return SamplingFlags(
            noise=bool((v["temperature"][at] > 0).any()),
            min_p=bool((v["min_p"][at] > 0).any()),
            top_k=bool((self._top_k[at] < self._vocab_size).any()),
            top_p_rounds=SamplingFlags.rounds_for(float(top_p.min())),
            top_p_rows=min(padded(int((top_p < 1.0).sum())), len(at)),
            penalties=bool(self._counts[at].any()),
            bias=any(int(s) in self._bias for s in seats),
            min_tokens=any(int(s) in self._stops for s in seats),
            allowed=any(int(s) in self._allowed for s in seats),
            xtc=bool((v["xtc_probability"][at] > 0).any()),
            window=bool((self._window[at] > 0).any()),
            logprobs=self._bucket(int(self._logprobs[at].max())),
        )

    def scores(self, seats: Sequence[int]) -> int:
        """Return how many likeliest tokens a step that scores the prompts of these seats computes; -1: none wants
        scores.
        """
        return self._bucket(int(self._prompt_logprobs[np.asarray(seats)].max()))

    def _bucket(self, most: int) -> int:
        """Return a number of alternatives rounded up to one of few values."""
        return min(most if most <= 0 else 5 if most <= 5 else 20, self._vocab_size)

    def arrays(self, seats: Sequence[int], flags: SamplingFlags) -> SamplingArrays:
        """Return the sampling parameters of these seats, one row each, as far as the flags ask for them."""
        at = np.asarray(seats)
        columns = {name: mx.array(self._values[name][at][:, None]) for name in _FLOATS}
        truncated = np.flatnonzero(self._values["top_p"][at] < 1.0)
        top_p_at = np.resize(truncated, flags.top_p_rows).astype(np.int32)
        bias = None
        if flags.bias:
            dense = np.zeros((len(seats), self._vocab_size), np.float32)
            for row, seat in enumerate(seats):
                for token, value in self._bias.get(int(seat), ()):
                    dense[row, token] = value
            bias = mx.array(dense)
        until = stops = None
        if flags.min_tokens:
            positions, banned = np.zeros((len(seats), 1), np.int32), np.zeros((len(seats), self._vocab_size), np.bool_)
            for row, seat in enumerate(seats):
                if int(seat) in self._stops:
                    positions[row], ids = self._stops[int(seat)]
                    banned[row, list(ids)] = True
            until, stops = mx.array(positions), mx.array(banned)
        allowed = kept = window = None
        if flags.allowed:
            allowed = mx.array(self._allowed_bits(seats))
        if flags.xtc:
            columns |= {name: mx.array(self._values[name][at][:, None]) for name in _XTC}
            kept = mx.array(self._marked(seats, self._xtc_kept))
        if flags.window:
            window = mx.array(self._window[at][:, None])
        return SamplingArrays(
            **columns,
            top_k=mx.array(self._top_k[at][:, None]),
            key=mx.array(self._keys[at]),
            top_p_at=mx.array(top_p_at),
            bias=bias,
            min_until=until,
            stops=stops,
            allowed=allowed,
            xtc_kept=kept,
            window=window,
        )

    def _allowed_bits(self, seats: Sequence[int]) -> npt.NDArray[np.uint32]:
        """Return [seats, words]: the tokens that each seat may draw, a bit for each."""
        words = max(mask_words(self._vocab_size), 8)  # a kernel on Metal reads smaller arrays otherwise
        bits = np.full((len(seats), words), 0xFFFFFFFF, np.uint32)
        for row, seat in enumerate(seats):
            if int(seat) in self._allowed:
                marked = np.zeros(32 * words, np.bool_)
                marked[list(self._allowed[int(seat)])] = True
                bits[row] = np.packbits(marked, bitorder="little").view(np.uint32)
        return bits

    def _marked(self, seats: Sequence[int], ids: dict[int, tuple[int, ...]]) -> npt.NDArray[np.bool_]:
        """Return [seats, vocabulary] bool: the tokens that each seat has in `ids`."""
        marked = np.zeros((len(seats), self._vocab_size), np.bool_)
        for row, seat in enumerate(seats):
            marked[row, list(ids.get(int(seat), ()))] = True
        return marked

    def seen(self, flags: SamplingFlags) -> list[mx.array]:
        """Return the token counts of all seats that a step with these flags needs, for `TokenCounts.of`."""
        if not flags.penalties:
            return []
        assert self.prompt_seen is not None
        assert self.output_count is not None
        arrays = [self.prompt_seen, self.output_count]
        if flags.window:
            assert self.recent is not None
            arrays.append(self.recent)
        return arrays

    def remember(self, seen: Sequence[mx.array]) -> None:
        """Keep the arrays that `TokenCounts.after` returned for a step."""
        if seen:
            self.output_count = seen[0]
        if len(seen) > 1:
            self.recent = seen[1]

    def wanted_logprobs(self, seat: int) -> int:
        """Return how many alternatives to a drawn token the seat wants logprobs of; -1: no logprobs at all."""
        return int(self._logprobs[seat])

    def wanted_prompt_logprobs(self, seat: int) -> int:
        """Return how many alternatives to a token of the prompt the seat wants logprobs of; -1: none at all."""
        return int(self._prompt_logprobs[seat])

    def _count(self, seating: Seating) -> None:
        """Count the tokens of a sequence so far; steps add those that they draw."""
        if self.prompt_seen is None or self.output_count is None:
            shape = (self.padding + 1, self._vocab_size)
            self.prompt_seen, self.output_count = mx.zeros(shape, mx.bool_), mx.zeros(shape, mx.float32)
        n = self._vocab_size
        prompt = np.bincount(seating.history[: seating.prompt_length], minlength=n) > 0
        output = np.bincount(np.array(seating.history[seating.prompt_length :], np.int64), minlength=n)
        self.prompt_seen[seating.seat] = mx.array(prompt)
        self.output_count[seating.seat] = mx.array(output.astype(np.float32))
        if window := int(self._window[seating.seat]):
            self.recent = _with_room(self.recent, self.padding + 1, window)
            length = self.recent.shape[1]
            tokens = np.array(seating.history[-length:], np.int32)
            self.recent[seating.seat] = mx.array(np.pad(tokens, (length - len(tokens), 0), constant_values=-1))


def _with_room(recent: mx.array | None, seats: int, window: int) -> mx.array:
    """Return [seats, length] int32 with at least `window` columns; present columns stay at the end."""
    length = 0 if recent is None else recent.shape[1]
    if recent is not None and length >= window:
        return recent
    longer = 1 << max(window - 1, 15).bit_length()
    room = mx.full((seats, longer - length), -1, mx.int32)
    return room if recent is None else mx.concatenate([room, recent], 1)
