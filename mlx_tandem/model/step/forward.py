"""The forward of a model, together with the draws of its rows, as pure functions of arrays.

Pools and everything else that a step changes are arguments and come back as results. They are written in place, since
nothing else holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY
from mlx_tandem.model import backend
from mlx_tandem.model.backend import cpu_functions
from mlx_tandem.model.cache.pools import KVPools
from mlx_tandem.model.cache.states import StateCache, StateView, arranged
from mlx_tandem.model.cache.turns import Turns, line_of
from mlx_tandem.model.inputs import ArraySpec, copied, receive
from mlx_tandem.model.kernels import dialect, inplace
from mlx_tandem.model.kernels.exchange import Gate, Report
from mlx_tandem.model.kernels.inplace import after, zero_of
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.modules import mix_in
from mlx_tandem.model.mtp import PredictionHead
from mlx_tandem.model.ops import delta_net, gated_delta, mlp, residual
from mlx_tandem.model.ops.attention.cache import PagedCache, PoolLayout, StepView
from mlx_tandem.model.ops.attention.rotary import SharedAngles
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.products.merged import merged_in
from mlx_tandem.model.ops.sampling.drafts import Accept, Settle
from mlx_tandem.model.ops.sampling.sampler import Pickers, SamplingArrays, SamplingFlags, sample, score
from mlx_tandem.model.recurrent import ServedRecurrent, gathered_bytes, recurrent_modules, speed_up_convolutions
from mlx_tandem.model.step.chain import Chain
from mlx_tandem.model.step.draw import Drawing, HeadPositions, drawing
from mlx_tandem.model.step.operands import Operands, StepKey
from mlx_tandem.model.step.pauses import Pacer, Pause
from mlx_tandem.model.step.rows import places_at, settled
from mlx_tandem.model.vision.embeddings import ShownImages

Ranges = Sequence[tuple[int, int] | None]
"""For each pool the range (first, end) of the blocks that a forward reads in place; None: it gathers them."""

Step = Callable[..., tuple[Any, ...]]
"""A function as `Forward.step` returns it."""


class StepArrays(NamedTuple):
    """The results of a step. A compiled step returns them as a plain tuple.

    Attributes:
        drawn: The drawn arrays, or the logits of rows that wait for masks and what belongs to them.
        scored: The scores, or the pooled hidden states.
        marker: The arrays to evaluate.
        last_tokens: The newest token of each seat.
        moved: With drafts, where these tokens are.
        known: The token counts.
        pool: The arrays of the pools.
        order: The order of writes; empty where none is kept.
        lines: New states that are to be written when the step is done. If the step verifies drafts, those after each
            turn, and behind them the position [rows] of each row's first token.
        drafts: The drafts that the model's head makes, if it makes any.
    """

    drawn: list[mx.array]
    scored: list[mx.array]
    marker: list[mx.array]
    last_tokens: mx.array
    moved: list[mx.array]
    known: list[mx.array]
    pool: list[list[mx.array]]
    order: list[mx.array]
    lines: list[mx.array]
    drafts: list[mx.array]


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
    """A model's head for multi-token prediction with its cache, which reads and drafts in each step.

    The head's keys and values lie in the pool beside those of the model's layers, in the same blocks: what it caches at
    a position follows from the tokens up to the next one. So everything that is done with blocks (prefixes that are
    shared, choices of one prompt, preemption, the drive) is done for the head, too. Where a cached prefix ends, the
    head's last position may have been computed for another next token; its drafts may be worse for that, and nothing
    else depends on it.

    `nobody` is the seat in place of the seats of rows that do not draw.
    """

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


class _Drawn(NamedTuple):
    """The part of a step's results that its draws change, and what a head needs of the draws."""

    outputs: list[mx.array]
    marker: list[mx.array]
    last_tokens: mx.array
    moved: list[mx.array]
    known: list[mx.array]
    draws: Draws | None


def _drawn(
    key: StepKey,
    given: Operands[mx.array],
    offset: mx.array,
    logits: mx.array,
    last_tokens: mx.array,
    draw: Callable[[mx.array, mx.array], Any],
) -> _Drawn:
    """Return what the rows draw, or the logits of rows that wait for masks.

    draw: takes the positions and the seats of the tokens to be drawn.
    """
    position = offset + given.last + 1
    position = position if given.picked is None else position[given.picked]
    seats = given.seats if given.picked_seats is None else given.picked_seats
    if key.masked:
        outputs = [logits, position, seats + 0, *(array + 0 for array in given.drafts)]
        return _Drawn(outputs, [*outputs], last_tokens, [], [], None)
    outputs, last_tokens, known, moved, _ = draw(position, seats)
    marker = [*outputs, last_tokens, *moved]
    return _Drawn(outputs, marker, last_tokens, moved, known, Draws(outputs[0], position, seats))


class Forward:
    """A model over its paged caches and its states. It makes the pure function of each kind of step.

    nobody: the seat in place of the seats of rows that do not draw. If the model has a head for multi-token prediction,
    its cache is the last of `caches`.

    Attributes:
        num_layers: Number of caches of layers: their keys and values, and their states.
        gathered_share: The share of a row's state that a step gathers if the row decodes. Kernels read and write the
            rest in the pool.
    """

    def __init__(
        self,
        model: LoadedModel,
        caches: Sequence[PagedCache],
        lora: LoraState,
        pool: KVPools,
        mask_axes: int,
        pickers: Pickers,
        nobody: int,
        states: Sequence[StateCache] = (),
    ):
        module, mtp = model.module, model.mtp
        self.head = HeadPositions.of(module)
        self._module: Any = module
        own = caches if mtp is None else caches[:-1]
        self._ahead = None if mtp is None else HeadStep(mtp, caches[-1], pickers, nobody)
        self._place = len(own)  # of the head's arrays in the pools
        self._caches: Sequence[Any] = [*own, *states]
        self.num_layers = len(self._caches)
        self._arranged = arranged(module, own, states)
        if states:
            gated_delta.install(module)
            speed_up_convolutions(module)
            delta_net.install(module)
        for recurrent in (recurrent_modules(module) or ()) if states else ():
            if not isinstance(recurrent, ServedRecurrent):
                mix_in(recurrent, ServedRecurrent)
        self._alike = any(cache.keeps_order for cache in caches)
        if not self._alike:
            residual.install(module)
            mlp.install(module, model.dtype)
        whole = sum(cache.shape.nbytes() for cache in states)
        self.gathered_share = gathered_bytes(module, [cache.shape for cache in states]) / whole if states else 0.0
        self._lora = lora
        self._pickers = pickers
        here = backend.current()
        make = None if here.kernels.target is None else dialect.maker(here.kernels.target)
        shares, joins = (here.steps.numbers_as_one and make), (here.kernels.joins_operations and make)
        self._copy = Gate(shares) if shares else copied
        self.report = Report(shares) if shares else None
        self._accept = Accept(joins) if joins else None
        self._nobody = nobody
        self._merged = merged_in(module)
        self._angles = SharedAngles(module) if here.arithmetic.angles_are_slow else None
        self._images = None if model.encoder is None else ShownImages(module, model.encoder)
        self._has_axes = model.encoder is not None and bool(model.encoder.axes)
        self._pool_of = list(pool.pool_of)
        self._head_pool = 0 if mtp is None else self._pool_of.pop(self._place)
        gathers = inplace.writing().store is None and not any(cache.reads_in_place for cache in own)
        self._chain = Chain(module, [c.shape for c in own], self._pool_of, pickers) if gathers and not states else None
        self._layouts = [
            PoolLayout(own.num_blocks, own.block_size, mask_axes, window)
            for own, window in zip(pool.pools, pool.windows, strict=False)
        ]
        one_pool_without_window = len(self._layouts) == 1 and self._layouts[0].kept is None
        self._settle = Settle(joins) if joins and one_pool_without_window else None

    @property
    def chains(self) -> bool:
        """Whether rows can draw several tokens each in one step.

        They can if MLX's own operations write the pool, no kernel reads it in place, and the model keeps no states.
        """
        return self._chain is not None

    def reported(self, key: StepKey) -> int:
        """Return how many drawn tokens a step with this key writes back into its numbers; 0 if it writes none back."""
        reports = self.report is not None and key.samples and not key.masked and not key.chained
        return (key.picks or key.rows) if reports else 0

    def drawing(self, flags: SamplingFlags, num_new: int = 0) -> Drawing:
        """Return the function that draws with these flags, and writes so many new masks into the table of masks."""
        return drawing(flags, self._pickers, self._nobody, num_new, self._accept)

    def step(self, key: StepKey, expected: Sequence[ArraySpec], in_place: Ranges, pause: Pause) -> Step:
        """Return the step as a pure function of arrays and lists of arrays, which returns a `StepArrays`.

        expected: the specs of its inputs, which follow from the key; pause: how it waits for the device while it is
        built.
        """
        draw = self.drawing(key.flags)
        report = self.report if self.reported(key) else None

        def step(
            inputs: list[mx.array],
            last_tokens: mx.array,
            last_places: list[mx.array],
            sampling: list[mx.array],
            seen: list[mx.array],
            lora_arrays: list[mx.array],
            pool: list[list[mx.array]],
            order: list[mx.array],
            images: list[mx.array],
        ) -> tuple[Any, ...]:
            given = Operands.unflatten(receive(inputs, expected, self._copy), key)
            tokens, offset, places = self._resolved(key, given, last_tokens, last_places)
            tokens = after(order, tokens)  # everything in the forward depends on the tokens
            starts = [offset[given.states[0]]] if key.turns is not None else []
            views = self._views(key, given, offset, places, in_place, order, pause)
            self._lora.bind(lora_arrays, given.adapters, layout=key.layout)
            own = list(pool)
            arrays = [] if self._ahead is None else own.pop(self._place)
            logits, scored, written, hidden, fetched = self._logits(key, tokens, given, views, own, images)
            lines = [*views[-1].lines, *starts] if key.goes_on is not None else []
            # What is evaluated first decides the order: states are written while the layers are computed, so that
            # fewer of them are in memory at once.
            states = [zero_of(views[-1].written)] if key.goes_on is not None and views[-1].written else lines
            drawn = _Drawn([], scored or [logits[:1, :1]], last_tokens, [], [], None)
            if key.chained:
                assert self._chain is not None
                several = self._chain(key, given, logits, fetched, views, sampling, seen, self._model)
                drawn = _Drawn([several], [several], last_tokens, [], [], None)
            elif key.samples:
                held = last_tokens, sampling, seen, given.drafts, last_places

                def draw_and_report(*at: mx.array) -> Any:
                    (tokens, *others), *changed = draw(logits, *at, *held)
                    return [tokens if report is None else report(tokens, inputs[0]), *others], *changed

                drawn = _drawn(key, given, offset, logits, last_tokens, draw_and_report)
                drawn.marker.extend(scored)
            ahead = Ahead([], [], [])
            if self._ahead is not None:
                assert hidden is not None
                ahead = self._ahead(key, given, hidden, views[self._head_pool], arrays, drawn.draws, sampling)
                written.insert(self._place, ahead.written)
            order = [zero_of([logits, *states, *ahead.marker])] if order else []
            marker = [*states, *drawn.marker, *ahead.marker, *order]
            changed = drawn.last_tokens, drawn.moved, drawn.known, written, order
            return StepArrays(drawn.outputs, scored, marker, *changed, lines, ahead.drafts)

        return step

    def _views(
        self,
        key: StepKey,
        given: Operands[mx.array],
        offset: mx.array,
        places: Sequence[mx.array],
        in_place: Ranges,
        order: list[mx.array],
        pause: Pause,
    ) -> list[Any]:
        """Return what the caches of each pool are bound to, those of states at the end."""
        pacer = Pacer(pause) if pause.layers else None
        views: list[Any] = [
            StepView(offset, slots, tables, own, run, key.common_offset, pacer)
            for slots, tables, own, run in zip(places[::2], places[1::2], self._layouts, in_place, strict=True)
        ]
        for view in views:
            view.each = key.each if view.kept is None else 1
            view.turns_by_index = not (key.shifted or (key.images and self._has_axes))
        if key.turns is not None:
            first, drafting, output, base, tables = given.states
            line = line_of(base, tables, offset[first] - 1, self._layouts[0].block_size)
            turns = Turns(key.turns.drafts, first, drafting, output, self._lora.narrowed)
            views.append(StateView(after(order, line), None, turns))
        elif key.goes_on is not None:
            *read, written_to = given.states
            views.append(StateView(after(order, read[0]) if read else None, written_to))
        return views

    def _resolved(
        self, key: StepKey, given: Operands[mx.array], last_tokens: mx.array, last_places: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array, Sequence[mx.array]]:
        """Return the rows' tokens [rows, length], their offset [rows], and the slots and tables of each pool.

        CARRY is replaced by the newest token of the row's seat, and rows with slack begin behind the accepted drafts.
        Only the device knows both.
        """
        tokens, offset, places = given.tokens, given.offset, given.places
        layouts = self._layouts
        if given.bounds is not None and self._settle is not None:
            seats, tables, size = given.seats, places[1], layouts[0].block_size
            tokens, offset, slots = self._settle(
                tokens, offset, given.bounds, seats, tables, last_tokens, last_places[0], size
            )
            return tokens, offset, [slots, tables]
        if given.bounds is not None:
            offset = settled(offset, given.bounds, last_places[0][given.seats])
            places = places_at(offset, places, [own.kept for own in layouts], layouts[0].block_size)
        if key.carry:
            tokens = mx.where(tokens == CARRY, last_tokens[given.seats][:, None], tokens)
        return tokens, offset, places

    def _logits(
        self,
        key: StepKey,
        tokens: mx.array,
        given: Operands[mx.array],
        views: Sequence[Any],
        pool: Sequence[list[mx.array]],
        images: list[mx.array],
    ) -> tuple[mx.array, list[mx.array], list[list[mx.array]], mx.array | None, list[Sequence[mx.array]]]:
        """Return the results of the model and its caches.

        They are the logits [sampled rows, vocabulary]; the scores or pooled hidden states; each layer's arrays; the
        hidden states [rows, length, dim] where something reads them; and the keys and values that each layer has
        gathered, if the rows draw several tokens.
        """
        for cache, arrays, own in zip(self._caches, pool, self._pool_of, strict=True):
            cache.bind(arrays, views[own])
        reads_hidden = key.pooled or self._ahead is not None
        only_last = key.length > 1 and given.targets is None
        self.head.keep(given.last if only_last else None, given.picked, hidden=reads_hidden)
        if self._images is not None:
            self._images.bind(images)
        fetched: list[Sequence[mx.array]] = []
        try:
            output = self._output(tokens, self._arranged)
            logits = self.head.logits(output, given.last)
            fetched = [cache.keys_and_values() for cache in self._caches] if key.chained else []
        finally:
            self._lora.unbind()
            self.head.keep(None)
            if self._images is not None:
                self._images.bind([])
            written = [cache.release() for cache in self._caches]
        hidden = self.head.take_hidden() if reads_hidden else None
        if key.pooled and hidden is not None:
            return logits, self.head.pooled(hidden, given.last), written, hidden, fetched
        scored = [] if given.targets is None else score(output, given.targets, key.scores)
        return logits, scored, written, hidden, fetched

    def _model(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Return the logits [rows, vocabulary] of the base model for tokens [rows, 1]."""
        return self._output(tokens, caches)[:, 0]

    def _output(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Return the output of the model for these tokens, and drop what its layers shared."""
        try:
            with cpu_functions.serving(), cpu_functions.alike() if self._alike else nullcontext():
                output: mx.array = self._module(tokens, cache=caches)
        finally:
            if self._angles is not None:
                self._angles.clear()
            for whole in self._merged:
                whole.clear()
        return output
