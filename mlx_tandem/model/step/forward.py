"""The forward of a model, together with the draws of its rows, as pure functions of arrays.

Pools and everything else that a step changes are arguments and come back as results. They are written in place, since
nothing else holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_tandem.engine.plan import CARRY
from mlx_tandem.model import cpu, device
from mlx_tandem.model.cache.inplace import after, zero_of
from mlx_tandem.model.cache.kvcache import PagedCache, PoolLayout, StepView
from mlx_tandem.model.cache.pools import KVPools
from mlx_tandem.model.linears.merged import merged_in
from mlx_tandem.model.lora.state import LoraState
from mlx_tandem.model.step.draw import Drawing, drawing
from mlx_tandem.model.step.head import HeadPositions
from mlx_tandem.model.step.inputs import ArraySpec, receive
from mlx_tandem.model.step.key import StepKey
from mlx_tandem.model.step.operands import Operands
from mlx_tandem.model.step.rope import SharedAngles
from mlx_tandem.model.step.sampler import Greedy, SamplingFlags, score
from mlx_tandem.model.step.verify import places_at, settled

PAUSE = 6
"""Number of layers after which a forward that pauses waits for the device each time."""

Ranges = Sequence[tuple[int, int] | None]
"""For each pool the range (first, end) of the blocks that a forward reads in place; None: it gathers them."""

Step = Callable[..., tuple[Any, ...]]
"""A function as `Forward.step` returns it."""


class Forward:
    """A model over its paged caches. It makes the pure function of each kind of step.

    `nobody` is the seat in place of the seats of rows that do not draw.
    """

    def __init__(
        self,
        module: nn.Module,
        caches: Sequence[PagedCache],
        lora: LoraState,
        pool: KVPools,
        mask_axes: int,
        greedy: Greedy,
        nobody: int,
    ):
        self.head = HeadPositions.of(module)
        self._module: Any = module
        self._caches = caches
        self._lora = lora
        self._greedy = greedy
        self._nobody = nobody
        self._merged = merged_in(module)
        self._angles = SharedAngles(module) if device.is_cpu() else None
        self._pool_of = pool.pool_of
        self._layouts = [
            PoolLayout(own.num_blocks, own.block_size, mask_axes, window)
            for own, window in zip(pool.pools, pool.windows, strict=True)
        ]

    def drawing(self, flags: SamplingFlags, num_new: int = 0) -> Drawing:
        """Return the function that draws with these flags, and writes so many new masks into the table of masks."""
        return drawing(flags, self._greedy, self._nobody, num_new)

    def step(self, key: StepKey, expected: Sequence[ArraySpec], in_place: Ranges, *, pauses: bool) -> Step:
        """Return the step as a pure function of arrays and lists of arrays.

        It returns the drawn arrays, or the logits of rows that wait for masks and what belongs to them; the scores;
        the arrays to evaluate; the newest token of each seat; with drafts where these tokens are; the token counts;
        the pools; the order.

        expected: the specs of its inputs, which follow from the key; pauses: whether it waits for the device after
        every PAUSE layers.
        """
        draw = self.drawing(key.flags)

        def step(
            inputs: list[mx.array],
            last_tokens: mx.array,
            last_places: list[mx.array],
            sampling: list[mx.array],
            seen: list[mx.array],
            lora_arrays: list[mx.array],
            pool: list[list[mx.array]],
            order: list[mx.array],
        ) -> tuple[Any, ...]:
            given = Operands.unflatten(receive(inputs, expected), key)
            offset, places = given.offset, given.places
            if given.bounds is not None:
                offset = settled(offset, given.bounds, last_places[0][given.seats])
                places = self._places_at(offset, places)
            tokens = after(order, given.tokens)  # everything in the forward depends on the tokens
            if key.carry:
                tokens = mx.where(tokens == CARRY, last_tokens[given.seats][:, None], tokens)
            views = [
                StepView(offset, slots, tables, own, run, key.common_offset, PAUSE * pauses)
                for slots, tables, own, run in zip(places[::2], places[1::2], self._layouts, in_place, strict=True)
            ]
            self._lora.bind(lora_arrays, given.adapters, layout=key.layout)
            logits, scored, pool = self._logits(key, tokens, given, views, pool)
            order = [zero_of([logits])] if order else []
            if not key.samples:
                return [], scored, [*(scored or [logits[:1, :1]]), *order], last_tokens, [], [], pool, order
            position = offset + given.last + 1
            position = position if given.picked is None else position[given.picked]
            seats = given.seats if given.picked_seats is None else given.picked_seats
            if key.masked:
                undrawn = [logits, position, seats + 0, *(array + 0 for array in given.drafts)]
                return undrawn, scored, [*undrawn, *scored, *order], last_tokens, [], [], pool, order
            drawn = draw(logits, position, seats, last_tokens, sampling, seen, given.drafts, last_places)
            outputs, last_tokens, known, moved, _ = drawn
            marker = [*outputs, *scored, last_tokens, *moved, *order]
            return outputs, scored, marker, last_tokens, moved, known, pool, order

        return step

    def _places_at(self, offset: mx.array, given: Sequence[mx.array]) -> list[mx.array]:
        """Return the places of `Operands` for tokens at `offset` [rows], in all pools."""
        return places_at(offset, given, [own.kept for own in self._layouts], self._layouts[0].block_size)

    def _logits(
        self,
        key: StepKey,
        tokens: mx.array,
        given: Operands[mx.array],
        views: Sequence[StepView],
        pool: Sequence[list[mx.array]],
    ) -> tuple[mx.array, list[mx.array], list[list[mx.array]]]:
        """Return the logits [sampled rows, vocabulary], the scores or pooled hidden states, and each layer's arrays."""
        for cache, arrays, own in zip(self._caches, pool, self._pool_of, strict=True):
            cache.bind(arrays, views[own])
        only_last = key.length > 1 and given.targets is None
        self.head.keep(given.last if only_last else None, given.picked, hidden=key.pooled)
        try:
            with cpu.serving():
                output = self._module(tokens, cache=self._caches)
            logits = self.head.logits(output, given.last)
        finally:
            self._lora.unbind()
            self.head.keep(None)
            if self._angles is not None:
                self._angles.clear()
            for whole in self._merged:
                whole.clear()
            written = [cache.release() for cache in self._caches]
        if key.pooled:
            return logits, self.head.pooled(given.last), written
        return logits, [] if given.targets is None else score(output, given.targets, key.scores), written
