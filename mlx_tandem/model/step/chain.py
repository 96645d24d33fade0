"""The part of a step in which each row draws several tokens, one after the other, in the step's one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_tandem.model.cache.drafted import DraftedCache, DraftedView
from mlx_tandem.model.cache.kvcache import LayerShape, StepView
from mlx_tandem.model.cache.states import arranged
from mlx_tandem.model.step.key import StepKey
from mlx_tandem.model.step.operands import Operands
from mlx_tandem.model.step.sampler import Greedy, SamplingArrays, TokenCounts, sample

Model = Callable[[mx.array, list[Any]], mx.array]
"""A function from tokens [rows, 1] and a model's caches to logits [rows, vocabulary]."""


class Chain:
    """The forwards of a model behind the first one of a step.

    shapes: those of the layers; pool_of: the index of each layer's pool.
    """

    def __init__(self, module: Any, shapes: Sequence[LayerShape], pool_of: Sequence[int], greedy: Greedy):
        self._caches = [DraftedCache(shape) for shape in shapes]
        self._arranged = arranged(module, self._caches, [])
        self._pool_of = pool_of
        self._greedy = greedy

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

        logits: [rows, vocabulary], those of the first forward; fetched: each layer's keys and values, as that forward
        has gathered them; views: what each pool's layers shared in it; seen: the token counts of all seats, which do
        not change.
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
                drawn.append(sample(logits, newest + 1 + number, how, key.flags, own, self._greedy).tokens)
        finally:
            for cache in self._caches:
                cache.release()
        return mx.stack(drawn, 1)

    def _bind(self, views: Sequence[StepView], newest: mx.array, number: int) -> None:
        """Bind the caches for the forward of the drawn token of this number, from 1."""
        each = [DraftedView(view, newest, number) for view in views]
        for cache, own in zip(self._caches, self._pool_of, strict=True):
            cache.bind(each[own])
