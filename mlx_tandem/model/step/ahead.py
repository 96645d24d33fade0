"""The part of a step in which the model's head for multi-token prediction reads and drafts.

The head's keys and values lie in the pool beside those of the model's layers, in the same blocks: what it caches at a
position follows from the tokens up to the next one. So everything that is done with blocks (prefixes that are shared,
choices of one prompt, preemption, the drive) is done for the head, too. Where a cached prefix ends, the head's last
position may have been computed for another next token; its drafts may be worse for that, and nothing else depends on
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from mlx_tandem.model.backend import cpu_functions
from mlx_tandem.model.mtp import PredictionHead
from mlx_tandem.model.ops.attention.cache import PagedCache, StepView
from mlx_tandem.model.ops.sampling.sampler import Pickers, SamplingArrays, sample
from mlx_tandem.model.step.operands import Operands, StepKey


class Draws(NamedTuple):
    """What the rows of a forward have drawn: tokens, their positions, and the seats of the rows, [draws] each."""

    tokens: mx.array
    position: mx.array
    seats: mx.array


class Ahead(NamedTuple):
    """What a head has made in a step.

    Attributes:
        drafts: The tokens [draws] that it expects after the drawn ones, if it drafted; else nothing.
        marker: Arrays to evaluate with the step.
        written: The arrays of its part of the pool after the step.
    """

    drafts: list[mx.array]
    marker: list[mx.array]
    written: list[mx.array]


class HeadStep:
    """A head and its cache. `nobody` is the seat in place of the seats of rows that do not draw."""

    def __init__(self, head: PredictionHead, cache: PagedCache, pickers: Pickers, nobody: int):
        self._head = head
        self._cache = cache
        self._pickers = pickers
        self._nobody = nobody

    def __call__(
        self,
        key: StepKey,
        given: Operands[mx.array],
        hidden: mx.array,
        view: StepView,
        arrays: Sequence[mx.array],
        drawn: Draws | None,
        sampling: list[mx.array],
    ) -> Ahead:
        """Return what the head makes of the model's hidden states [rows, length, dim].

        Where the step does not draft, only keys and values are computed, since nothing else of the graph is evaluated.
        drawn: the tokens that the rows have drawn, if any; a head drafts only behind these.
        """
        following = given.following
        assert following is not None
        if drawn is not None:
            following = self._with_drawn(following, given, drawn)
        self._cache.bind(arrays, view)
        try:
            with cpu_functions.serving():
                ahead = self._head(hidden, following, self._cache)
            marker = self._cache.written()
        finally:
            written = self._cache.release()
        if not key.proposes or drawn is None:
            return Ahead([], marker, written)
        if given.picked is not None:
            ahead = ahead[given.picked]
        if ahead.shape[1] > 1:
            ahead = mx.take_along_axis(ahead, given.last[:, None, None], axis=1)
        # Counts of tokens and logprobs are for the tokens that are drawn. A draft without penalties is right mostly.
        flags = key.flags._replace(penalties=False, window=False, logprobs=-1)
        how = SamplingArrays.unflatten(sampling, key.flags)
        logits = self._head.logits(ahead)[:, 0]
        drafts = sample(logits, drawn.position + 1, how, flags, None, self._pickers).tokens
        return Ahead([drafts], [drafts, *marker], written)

    def _with_drawn(self, following: mx.array, given: Operands[mx.array], drawn: Draws) -> mx.array:
        """Return the tokens after each position [rows, length] with those that were drawn."""
        rows = len(following)
        last = given.last if given.picked is None else given.last[given.picked]
        own = mx.arange(rows) if given.picked is None else given.picked
        own = mx.where(drawn.seats == self._nobody, rows, own)  # padding goes into a line behind the others
        whole = mx.concatenate([following, following[:1]])
        whole[own, last] = mx.maximum(drawn.tokens, 0)
        return whole[:rows]
