"""The part of a step in which each row draws several tokens, one after the other, all in the graph of the step.

The step gathers each layer's keys and values from the pool once, in its first forward. The keys and values of the drawn
tokens are kept beside them for the rest of the step and never reach the pool: to write them there, MLX's own scatter
would copy the pool's arrays, which the forward before still reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tandem.model import backend
from mlx_tandem.model.backend import cpu_functions
from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.cache.states import arranged
from mlx_tandem.model.ops.attention.cache import StepView
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


# --- The caches of the forwards behind the first ---------------------------------------------------------------------


class DraftedView:
    """The inputs that all layers of one pool share in the forward of one drawn token a row.

    Attributes:
        offset: [rows] int32, the position of each row's token.

    Args:
        view: The view of the step's first forward.
        newest: [rows] int32, the position of each row's last token in the first forward.
        number: The number of the drawn token that the forward computes, from 1.
    """

    def __init__(self, view: StepView, newest: mx.array, number: int):
        self.offset = newest + number
        self._view = view
        self._newest = newest
        self._number = number
        self._masks: dict[int | None, mx.array] = {}
        self._whole: dict[int | None, mx.array] = {}

    def mask(self, window: int | None) -> mx.array:
        """Return [rows, 1 (, 1), 1, positions] bool: the gathered positions that each row's token sees."""
        if window not in self._masks:
            key = self._view.positions()
            seen = key <= self._newest[:, None, None]
            if window is not None:
                seen = seen & (key > self.offset[:, None, None] - window)
            self._masks[window] = mx.expand_dims(seen, self._view.mask_axes)
        return self._masks[window]

    def drawn(self, window: int | None) -> int:
        """Return how many of the drawn tokens this forward's token sees, including itself."""
        return self._number if window is None else min(self._number, window)

    def whole(self, window: int | None) -> mx.array:
        """Return the mask [rows, 1 (, 1), 1, positions + number] of the gathered positions and all drawn tokens."""
        if window not in self._whole:
            seen = self.mask(window)
            shape = (*seen.shape[:-1], self._number)
            own = np.broadcast_to(np.arange(self._number) >= self._number - self.drawn(window), shape)
            self._whole[window] = mx.concatenate([seen, mx.array(own)], axis=-1)
        return self._whole[window]

    def window(self, mask: mx.array | str | None) -> tuple[int | None] | None:
        """Return the window of a mask made by `whole`, in a tuple; None for any other mask."""
        return next(((window,) for window, made in self._whole.items() if made is mask), None)


class DraftedCache:
    """The cache of one layer in the forwards that compute drawn tokens."""

    def __init__(self, shape: LayerShape):
        self.shape = shape
        self._context: Sequence[mx.array] = ()
        self._own: tuple[list[mx.array], list[mx.array]] = ([], [])
        self._view: DraftedView | None = None
        self._fetched: tuple[mx.array, ...] = ()

    def begin(self, context: Sequence[mx.array]) -> None:
        """Begin a step whose first forward has gathered these keys and values [rows, heads, positions, dim]."""
        self._context, self._own = context, ([], [])

    def bind(self, view: DraftedView) -> None:
        """Bind the cache for a forward."""
        self._view = view

    def release(self) -> None:
        """Drop all arrays of a step."""
        self._context, self._own, self._view, self._fetched = (), ([], []), None, ()

    # called by mlx-lm's modules

    @property
    def offset(self) -> mx.array:
        """Positions [rows] int32 of the rows' tokens."""
        assert self._view is not None
        return self._view.offset

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        """Return the mask of one query per row."""
        assert self._view is not None
        return self._view.whole(self.shape.window if window_size is None else window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keep keys and values [rows, heads, 1, dim]; return those of all positions [rows, heads, positions, dim]."""
        k, v = (
            self._update(form, own, new)
            for form, own, new in zip(self.shape.halves, self._own, (keys, values), strict=True)
        )
        before_k, before_v = self._context
        self._fetched = mx.concatenate([before_k, *k], axis=2), mx.concatenate([before_v, *v], axis=2)
        return self._fetched[0], self._fetched[1]

    def keys_and_values(self) -> tuple[mx.array, ...]:
        """Return what `update_and_fetch` returned in this forward."""
        return self._fetched

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: mx.array | str | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Return the attention of a layer, which the hook sends here.

        Attention over the keys just fetched is computed in two parts if there are many scores, so that the gathered
        keys are not copied.
        """
        v = self._view
        assert v is not None
        fetched = len(self._fetched) == 2 and keys is self._fetched[0] and values is self._fetched[1]
        window = v.window(mask)
        few = queries.shape[0] * queries.shape[1] * keys.shape[2] < cpu_functions.WORTH
        if few or not fetched or window is None or sinks is not None or queries.dtype != mx.float32:
            return backend.current().attend(queries, keys, values, scale, mask, sinks)
        seen = v.drawn(*window)
        own = [mx.concatenate(new[-seen:], axis=2) if seen > 1 else new[-1] for new in self._own]
        return cpu_functions.attend_behind(queries, self._context, own, scale, v.mask(*window))

    @staticmethod
    def _update(form: RowFormat, own: list[mx.array], new: mx.array) -> list[mx.array]:
        """Append keys or values, as the pool would hold them, to those of the tokens drawn before; return all."""
        lines = [line.reshape(*new.shape[:3], -1) for line in form.encode(new.reshape(-1, form.dim))]
        own.append(form.decode(lines))
        return own
