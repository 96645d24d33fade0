"""The caches of forwards that compute the tokens that a step itself has drawn, one after the other.

A step that draws several tokens a row gathers each layer's keys and values from the pool once, in its first forward.
The keys and values of the drawn tokens are kept beside them for the rest of the step and never reach the pool: to write
them there, MLX's own scatter would copy the pool's arrays, which the forward before still reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_tandem.model.backend import cpu_functions
from mlx_tandem.model.cache.kvformat import LayerShape, RowFormat
from mlx_tandem.model.ops.attention import portable
from mlx_tandem.model.ops.attention.cache import StepView


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
            return portable.attend(queries, keys, values, scale, mask, sinks)
        seen = v.drawn(*window)
        own = [mx.concatenate(new[-seen:], axis=2) if seen > 1 else new[-1] for new in self._own]
        return cpu_functions.attend_behind(queries, self._context, own, scale, v.mask(*window))

    @staticmethod
    def _update(form: RowFormat, own: list[mx.array], new: mx.array) -> list[mx.array]:
        """Append keys or values, as the pool would hold them, to those of the tokens drawn before; return all."""
        lines = [line.reshape(*new.shape[:3], -1) for line in form.encode(new.reshape(-1, form.dim))]
        own.append(form.decode(lines))
        return own
