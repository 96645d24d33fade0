"""The part of a step in which each row draws several tokens, one after the other, all in the graph of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.states import arranged
from mlx_tandem.model.ops.attention.cache import StepView
from mlx_tandem.model.ops.attention.drafted import DraftedCache, DraftedView
from mlx_tandem.model.ops.sampling.sampler import Pickers, SamplingArrays, TokenCounts, sample
from mlx_tandem.model.step.operands import Operands, StepKey

Model = Callable[[mx.array, list[Any]], mx.array]
"""A function from tokens [rows, 1] and a model's caches to logits [rows, vocabulary]."""


class Chain:
    """The draws of a step in which each row draws several tokens, with the forwards behind the step's first one.

    shapes: the shape of each layer's cache; pool_of: the index of each layer's pool.
    """

    def __init__(self, module: Any, shapes: Sequence[LayerShape], pool_of: Sequence[int], pickers: Pickers):
        self._caches = [DraftedCache(shape) for shape in shapes]
        self._arranged = arranged(module, self._caches, [])
        self._pool_of = pool_of
        self._pickers = pickers

    def __call__(
        self,
        key: StepKey,
        given: Operands[mx.array],
        logits: mx.array,
        fetched: Sequence[Sequence[mx.array]],
        views: Sequence[StepView],
        sampling: list[mx.array],
        seen: list[mx.array],
        model: Model,
    ) -> mx.array:
        """Return the tokens [rows, chained] int32 that the rows draw.

        Args:
            key: The step's key.
            given: The inputs of the first forward.
            logits: The logits [rows, vocabulary] of the first forward.
            fetched: Each layer's keys and values, as the first forward has gathered them.
            views: The views of the first forward, one for each pool.
            sampling: The sampling parameters of the rows, as `SamplingArrays.unflatten` takes them.
            seen: The token counts of all seats, which do not change.
            model: The model that computes the further forwards.
        """
        newest = given.offset + given.last
        how = SamplingArrays.unflatten(sampling, key.flags)
        counts = TokenCounts.of(seen, given.seats)
        for cache, context in zip(self._caches, fetched, strict=True):
            cache.begin(context)
        drawn: list[mx.array] = []
        try:
            for number in range(key.chained):
                own = counts
                if drawn:
                    self._bind(views, newest, number)
                    logits = model(mx.maximum(drawn[-1], 0)[:, None], self._arranged)
                    own = None if counts is None else counts.behind(mx.stack(drawn, 1))
                drawn.append(sample(logits, newest + 1 + number, how, key.flags, own, self._pickers).tokens)
        finally:
            for cache in self._caches:
                cache.release()
        return mx.stack(drawn, 1)

    def _bind(self, views: Sequence[StepView], newest: mx.array, number: int) -> None:
        """Bind the caches for the forward that computes the drawn token with this number, from 1."""
        each = [DraftedView(view, newest, number) for view in views]
        for cache, own in zip(self._caches, self._pool_of, strict=True):
            cache.bind(each[own])
