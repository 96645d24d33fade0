"""The cost model of steps: predicted milliseconds, learned from the steps of this device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mlx_tandem.engine.plan import RowKind, StepPlan
from mlx_tandem.engine.prompt_cost import features

LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
"""Chunk lengths that the runner pads to. They are few, so that each is traced once."""


def padded_length(tokens: int) -> int:
    """Return the length that a chunk of so many tokens is padded to; beyond LENGTHS, a multiple of the last."""
    for n in LENGTHS:
        if n >= tokens:
            return n
    return -(-tokens // LENGTHS[-1]) * LENGTHS[-1]


def unpadded_length(tokens: int) -> int:
    """Return the length of the longest chunk of at most so many tokens that needs no padding.

    It is one of LENGTHS, or a power of two below the shortest of them.
    """
    if tokens < LENGTHS[0]:
        return 1 << (tokens.bit_length() - 1)
    return max(n for n in LENGTHS if n <= tokens)


def longest_within(pairs: int, context: int) -> int:
    """Return the longest padded length n with n · (context + n) at most `pairs`, at least the shortest of LENGTHS.

    `context` is the number of tokens before the chunk.
    """
    return max((n for n in LENGTHS if n * (context + n) <= pairs), default=LENGTHS[0])


class CostModel:
    """A model of the milliseconds that the parts of a step take.

    A chunk of a prompt: scale · (a + b·length + c·length·(context + length / 2) + d·context), where `context` is the
    number of tokens before it. Decoding: scale' · (a' + b'·rows).

    A chunk deep in a long context costs ten times as much as one at its start, so a budget in tokens would stall the
    streams that decode at the same time. The forms (the parameters a to d, a' and b') are fitted at start, on a quiet
    device. While serving, only the scales follow the measured times, so that odd measurements cannot bend a form.
    """

    def __init__(self) -> None:
        # The values of a slow machine, until `fit` is called.
        self._chunk_form = np.array([0.5, 5.0, 5.0, 0.5])
        self._decode_form = np.array([1.0, 0.1])
        self._chunk_scale = self._decode_scale = 1.0

    @property
    def form(self) -> tuple[float, ...]:
        """The parameters (a, b, c, d) of a chunk, without the scale, for `prompt_seconds`."""
        return tuple(float(x) for x in self._chunk_form)

    def fit(self, chunks: list[tuple[int, int, float]], decodes: list[tuple[int, float]] | None = None) -> None:
        """Fit the forms to measured chunks (length, context, milliseconds) and decode steps (rows, milliseconds)."""
        self._chunk_form = _nonnegative_fit([features(n, context) for n, context, _ in chunks], [c[2] for c in chunks])
        self._chunk_scale = 1.0
        if decodes:
            self._decode_form = _nonnegative_fit([(1.0, rows) for rows, _ in decodes], [d[1] for d in decodes])
            self._decode_scale = 1.0

    def observe(self, chunks: list[tuple[int, int]], decode_rows: int, milliseconds: float) -> None:
        """Adapt the scales to a step with these chunks (length, context) and so many decoding rows."""
        expected = self.step(chunks, decode_rows)
        if expected <= 0.0:
            return
        # The change is clipped: a step that took a second because another program ran must not stop the prompts.
        change = min(max(milliseconds / expected, 0.5), 2.0) ** 0.1
        if chunks:
            self._chunk_scale = min(max(self._chunk_scale * change, 1e-3), 1e3)
        if decode_rows:
            self._decode_scale = min(max(self._decode_scale * change, 1e-3), 1e3)

    def observe_step(self, plan: StepPlan, milliseconds: float) -> None:
        """Adapt the scales to a step that took so long, unless it is of a kind whose cost is not modelled."""
        if _is_plain(plan) and not any(row.piggybacked for row in plan.rows):
            self.observe(*_parts_of(plan), milliseconds)

    def expected(self, plan: StepPlan) -> float:
        """Return the milliseconds that a step will take; infinite for a kind whose cost is not modelled."""
        return self.step(*_parts_of(plan)) if _is_plain(plan) else math.inf

    def step(self, chunks: list[tuple[int, int]], decode_rows: int) -> float:
        """Return the milliseconds of a step with these chunks (length, context) and so many decoding rows."""
        return sum(self.predict(*chunk) for chunk in chunks) + (self.decode(decode_rows) if decode_rows else 0.0)

    def fixed(self) -> float:
        """Return the milliseconds that every chunk costs, however short; most of them are spent reading the weights."""
        return self._chunk_scale * float(self._chunk_form[0])

    def least(self) -> float:
        """Return the milliseconds of a chunk of which half is the fixed cost of any chunk."""
        return 2.0 * self.fixed()

    def tokens(self, milliseconds: float) -> int:
        """Return how many extra prompt tokens near position 0 fit into `milliseconds` of a forward that runs anyway."""
        each = self._chunk_scale * float(self._chunk_form[1]) / 256
        return int(milliseconds / max(each, 1e-9))

    def decode(self, rows: int) -> float:
        """Return the milliseconds of a step in which so many rows decode."""
        return self._decode_scale * float(self._decode_form @ np.array([1.0, rows]))

    def predict(self, length: int, context: int) -> float:
        """Return the milliseconds of a chunk of `length` tokens after `context` tokens."""
        return self._chunk_scale * float(self._chunk_form @ features(length, context))

    def affordable(self, context: int, milliseconds: float, longest: int) -> int:
        """Return the longest padded length up to `longest` that is predicted to fit, at least the
        shortest of LENGTHS.
        """
        best = LENGTHS[0]
        for n in LENGTHS:
            if n > longest or self.predict(n, context) > milliseconds:
                break
            best = n
        return best


def _is_plain(plan: StepPlan) -> bool:
    """Return whether a step has only chunks of prompts and decoding rows, and nothing else that takes long."""
    if plan.saves or plan.loads or plan.masked or not plan.rows:
        return False
    return all(row.kind is not RowKind.VERIFY for row in plan.rows)


def _parts_of(plan: StepPlan) -> tuple[list[tuple[int, int]], int]:
    """Return the chunks of prompts (padded length, context), and the number of other tokens:
    decoding and piggybacked.
    """
    chunks = [r for r in plan.rows if r.kind is RowKind.PROMPT and not r.piggybacked]
    decodes = sum(len(r.tokens) for r in plan.rows) - sum(len(r.tokens) for r in chunks)
    return [(padded_length(len(r.tokens)), r.start) for r in chunks], decodes


def _nonnegative_fit(inputs: Sequence[tuple[float, ...]], milliseconds: list[float]) -> np.ndarray:
    """Return the non-negative weights of least relative error.

    Every choice of weights that may differ from zero is tried, of which there are at most fifteen.
    """
    y = np.maximum(np.array(milliseconds), 1e-3)
    x = np.array(inputs) / y[:, None]
    parts = x.shape[1]
    best, found = float("inf"), np.zeros(parts)
    for mask in range(1, 1 << parts):
        chosen = [i for i in range(parts) if mask >> i & 1]
        weights = np.linalg.lstsq(x[:, chosen], np.ones(len(y)), rcond=None)[0]
        error = float(((x[:, chosen] @ weights - 1.0) ** 2).sum())
        if (weights >= 0).all() and error < best:
            best, found = error, np.zeros(parts)
            found[chosen] = weights
    return found
