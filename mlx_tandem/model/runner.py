"""The MLX runner: it executes step plans over the paged pool with mlx-lm's unmodified model modules.

A step is cut into rectangles of rows of one length: decoding rows with the rows that share their forward, and prompt
chunks by padded length. Each rectangle is one call of a pure function of (tokens, offsets, tables, sampling arrays,
adapter arrays, pools), compiled for each shape. Pools are arguments and come back as results, written in place since
nothing else holds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.budget import UNLIMITED, StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.plan import CARRY, Bytes, Mask, Row, RowKind, StepPlan, StepResult
from mlx_tandem.model import compiler, cpu, device
from mlx_tandem.model.cache import inplace
from mlx_tandem.model.cache.inplace import after, zero_of
from mlx_tandem.model.cache.kvcache import LayerKernels, LayerShape, PagedCache, StepView
from mlx_tandem.model.cache.pools import KVPools
from mlx_tandem.model.kernels.paged_attention import MOST_QUERIES
from mlx_tandem.model.linears.merged import merged_in
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.lora.state import LoraState
from mlx_tandem.model.step.draw import Drawing, Undrawn, drawing, words_of
from mlx_tandem.model.step.head import HeadPositions
from mlx_tandem.model.step.index_arrays import IndexArrays
from mlx_tandem.model.step.inputs import ArraySpec, Inputs, padded, receive, specs
from mlx_tandem.model.step.key import StepKey
from mlx_tandem.model.step.parts import Flight, Part
from mlx_tandem.model.step.rope import SharedAngles
from mlx_tandem.model.step.sampler import Greedy, SamplingFlags, by_argmax, score
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.model.step.shapes import (
    blocks_read,
    coarse_count,
    coarse_width,
    cut,
    most_blocks_read,
    row_count,
    split_by_context,
    table_width,
)
from mlx_tandem.model.step.verify import drafts_of, goes_with_decodes, places_at, settled, take_verified, token_by_token
from mlx_tandem.types import TokenLogprob

VIEW_BLOCKS = 32
"""Fewest blocks that a prompt chunk reads in place, if they are contiguous, instead of gathering them."""

COMMON_OFFSET_TOKENS = 256
"""Fewest tokens of a chunk after a context that are worth a forward of their own where masks make attention slow."""

LONG_TOKENS, PAUSE = 1024, 6
"""Tokens from which on a forward waits for the GPU, and the number of layers after which it does so each time."""

MANY_TOKENS = 64
"""Tokens of a forward from which on its matrix products use every core of a CPU."""

MAX_COMPILED = 256
"""Most compiled steps that are kept, the last used ones. Shapes and sampling flags have few values each, but many
combinations, and a step takes 0.2 MB of the host's memory for each layer."""

USUAL = 3
"""Number of times that a kind of mixed step runs before it is traced, since most kinds occur only a few times."""

MET = 1024
"""Most kinds of mixed steps that are counted."""

KEPT_SAMPLING = 4
"""Most sets of rows whose sampling arrays are kept: those of a step's parts. Some are as wide as the vocabulary."""


class MLXRunner:
    """The runner of a loaded model.

    `weights` maps the digests that `StepPlan.uploads` may name to adapters; the owner keeps it current. `attention` has
    for each layer the kernels that answer few queries, or None for the portable back end; empty: None for all layers.
    Decoding rows are padded to `row_counts`, ascending, and beyond them as `shapes.row_count` does.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[LayerShape],
        lora: LoraState,
        weights: Mapping[str, AdapterWeights],
        *,
        vocab_size: int,
        num_blocks: Sequence[int],
        block_size: int,
        max_num_seqs: int,
        mask_axes: int,
        limits: StepLimits = UNLIMITED,
        attention: Sequence[LayerKernels | None] = (),
        row_counts: Sequence[int] = (),
        greedy: Greedy = by_argmax,
    ):
        self._model: Any = model.module
        self._head = HeadPositions.of(model.module)
        self._merged = merged_in(model.module)
        self._angles = SharedAngles(model.module) if device.is_cpu() else None
        self._lora = lora
        self._weights = weights
        self._block_size = block_size
        self._mask_axes = mask_axes
        self._limits = limits
        self._row_counts = row_counts
        self._greedy = greedy
        self._seats = Seats(max_num_seqs, vocab_size)
        attention = attention or [None] * len(layers)
        self._caches = [PagedCache(*each) for each in zip(layers, attention, strict=True)]
        # Up to so many tokens per row, kernels read the pool in place: the step needs no memory for gathered keys, and
        # short contexts are not padded to the length of long ones.
        self._fused_length = MOST_QUERIES if all(attention) else 0
        self._order = lora.order  # adapters' slots are written in place as well
        self._pool = KVPools(layers, num_blocks, block_size, self._order)
        self._index_arrays = IndexArrays(max_num_seqs, block_size, self._pool.firsts, self._pool.windows)
        self._steps: OrderedDict[StepKey, Callable[..., Any]] = OrderedDict()
        self._first_uses = 0  # forwards since the start that were traced first, or run as they are
        self._drawings: dict[SamplingFlags, Drawing] = {}  # compiled, of rows with masks
        self._met: Counter[StepKey] = Counter()  # kinds of mixed steps
        self.inputs = Inputs()
        self._recent: OrderedDict[Any, tuple[SamplingFlags, list[mx.array]]] = OrderedDict()  # sampling arrays
        # Where MLX's own operations write and operations in flight hold their inputs, a write dispatched behind a read
        # of the pool would copy the pool. There each part is built while the part before it runs, and dispatched when
        # that is done. Whether the device needs this is measured at start (`overlap.py`).
        self.one_at_a_time = device.is_cpu()
        # On a CPU there is no fused attention that a mask would prevent.
        self.common_offsets = not device.is_cpu()
        self.pauses = device.is_cuda()  # elsewhere the host is at most a few command buffers ahead of the device
        self._built: deque[Part] = deque()  # parts that are not dispatched yet
        self._running: Part | None = None
        self._last, self._places_of_last = self._seats.no_tokens(), self._seats.no_tokens()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pools."""
        return self._pool.nbytes

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, the input of the output head; 0 if no step has shown it."""
        return self._head.width

    @property
    def compiled_steps(self) -> int:
        """Number of compiled steps that are kept now."""
        return len(self._steps)

    # the Runner protocol

    def launch(self, plan: StepPlan) -> Flight:
        """Build and dispatch the parts of a step; return a handle. Raises DeviceError."""
        try:
            # Reads of saved blocks are dispatched before anything that writes the pool.
            parts = self._save_blocks(plan.saves) if plan.saves else []
            for slot, digest in plan.uploads:
                if self._lora.install(slot, self._weights[digest]):
                    self._steps.clear()
            first_uses = self._first_uses
            parts += self._copy_blocks(plan.copies) if plan.copies else []
            parts += self._load_blocks(plan.loads) if plan.loads else []
            for seating in plan.seatings:
                self._seats.take(seating)
                self._index_arrays.forget(seating.seat)
            self._built.extend(parts)
            self._dispatch()  # a part that pauses reads and writes the pool while it is built
            for rows in self._rectangles(plan.rows):
                parts.append(self._build_part(plan, rows))
                self._built.append(parts[-1])
                self._dispatch()
        except Exception as e:
            raise compiler.device_error(e) from e
        return Flight(plan, parts, first_use=self._first_uses != first_uses)

    def launch_waits(self, plan: StepPlan) -> bool:
        """Return whether `launch` may pause for the device because of long prompts."""
        prompts = sum(len(r.tokens) for r in plan.rows if r.kind is RowKind.PROMPT and not r.piggybacked)
        return self._may_pause and 4 * prompts >= LONG_TOKENS  # a chunk may be padded to more tokens

    def sample(self, handle: Flight, masks: list[list[Mask]]) -> None:
        """Let the masked rows of a launched plan draw. Raises DeviceError."""
        try:
            own = dict(zip(handle.plan.masked, masks, strict=True))
            for undrawn in [part.undrawn for part in handle.parts if part.undrawn is not None]:
                part = self._draw(undrawn, own)
                handle.parts.append(part)
                if self._built:
                    self._built.append(part)  # the forward that it draws from may be waiting, too
                else:
                    mx.async_eval(part.marker)  # it does not use the pool, so it follows its forward at once
        except Exception as e:
            raise compiler.device_error(e) from e

    def _draw(self, undrawn: Undrawn, masks: dict[int, list[Mask]]) -> Part:
        """Return the part that draws, by masks, for the rows that a forward left undrawn."""
        flags = undrawn.flags
        if flags not in self._drawings:
            self._drawings[flags] = mx.compile(drawing(flags, self._greedy, self._seats.padding))
        words = words_of(undrawn.rows, len(undrawn.logits), masks, undrawn.logits.shape[-1])
        drawn, self._last, seen, moved = self._drawings[flags](
            undrawn.logits,
            undrawn.position,
            undrawn.seats,
            self._last,
            undrawn.sampling,
            self._seats.seen(flags),
            undrawn.drafts,
            [self._places_of_last] if undrawn.drafts else [],
            mx.array(words),
        )
        self._seats.remember(seen)
        self._move(moved)
        marker = [*drawn, self._last, *moved]
        return Part(undrawn.rows, flags, drawn, marker, wanted=undrawn.wanted, verifies=undrawn.verifies)

    def _move(self, moved: Sequence[mx.array]) -> None:
        """Take in where each seat's newest token is after a step with drafts."""
        if moved:
            (self._places_of_last,) = moved

    def _dispatch(self) -> None:
        """Dispatch the parts that are built, or one at a time where the device needs that."""
        while self._built and not (self.one_at_a_time and self._running is not None):
            self._running = self._built.popleft()
            if self.one_at_a_time:
                device.blas_threads(every_core=self._running.tokens >= MANY_TOKENS)
            mx.async_eval(self._running.marker)

    def wait(self, handle: Flight) -> StepResult:
        """Wait until all parts of a step are done; return its result. Raises DeviceError."""
        tokens: list[tuple[int, ...]] = [()] * len(handle.plan.rows)
        logprobs: list[tuple[TokenLogprob, ...] | None] = []
        scores: dict[int, list[TokenLogprob]] = {}
        pooled: dict[int, list[float]] = {}
        saves: list[bytes] = []
        try:
            for part in handle.parts:
                mx.eval(part.marker)
                if self.one_at_a_time and not device.is_cpu():
                    mx.synchronize()  # a GPU releases the inputs of operations a little later
                if part.sent is not None:
                    self.inputs.done(part.sent)
                if part is self._running:
                    self._running = None
                self._dispatch()
                if part.saves:
                    saves = self._pool.bytes_of(part.marker, part.saves)
                if part.is_pooled:
                    pooled |= part.pooled(handle.plan)
                elif part.scored:
                    scores |= part.scores(handle.plan)
                if not part.drawn:
                    continue
                drawn: Any = part.drawn[0].tolist()
                if part.verifies:
                    take_verified(handle.plan, part.rows, drawn, tokens)
                else:
                    for i, token in zip(part.rows, drawn, strict=False):
                        if handle.plan.rows[i].sample:
                            tokens[i] = (token,)
                if part.flags.logprobs >= 0:
                    logprobs = logprobs or [None] * len(tokens)
                    for i, found in part.logprobs(handle.plan).items():
                        logprobs[i] = found[: len(tokens[i])]
        except Exception as e:
            raise compiler.device_error(e) from e
        return StepResult(tokens, logprobs, scores, saves, handle.first_use, pooled)

    def reset(self) -> None:
        """Drop everything in flight, all compiled steps and all contents of the pool, after a failed step."""
        self._steps.clear()
        self._drawings.clear()
        self._index_arrays.clear()
        self._recent.clear()
        self._seats.forget_counts()
        self._built.clear()
        self._running = None
        self._lora.unbind()
        self._head.keep(None)
        self._order.reset()
        self._pool.clear()
        self._last, self._places_of_last = self._seats.no_tokens(), self._seats.no_tokens()

    # a step

    def _rectangles(self, rows: Sequence[Row]) -> list[list[int]]:
        """Return the indices of the rows of each forward.

        Rows are grouped by padded length, apart if they need the logits of all positions, and split where their
        contexts differ much. Groups that would need more memory than the limits allow are cut.
        """
        decodes = [i for i, r in enumerate(rows) if goes_with_decodes(r)]
        usual = (1, False, False, None)
        by_length: dict[tuple[int, bool, bool, int | None], list[int]] = {usual: decodes} if decodes else {}
        for i, r in enumerate(rows) if len(decodes) < len(rows) else ():
            n = len(r.tokens)
            if goes_with_decodes(r):
                continue
            common_offset = self._common_offset([r])
            apart = None if common_offset is None else i if common_offset else -1
            length = 1 if n == 1 else padded_length(n)
            by_length.setdefault((length, bool(r.targets), r.pooling is not None, apart), []).append(i)
        pieces = []
        for (length, *_), group in by_length.items():
            if length <= self._fused_length:
                pieces.append(group)
                continue
            blocks = {i: blocks_read(rows[i], self._block_size, self._pool.windows[0]) for i in group}
            if length == 1:  # each token of such a row reads its blocks by itself
                blocks = {i: n * len(rows[i].tokens) for i, n in blocks.items()}
            positions = min(self._limits.positions, self._limits.pairs // length)
            for part in split_by_context(group, blocks):
                pieces += cut(part, blocks, positions // self._block_size, self._good_counts(length))
        return pieces

    def _good_counts(self, length: int) -> Sequence[int]:
        """Return the good row counts for rows of one token; padding longer rows would cost much."""
        return self._row_counts if length == 1 else ()

    def _build_part(self, plan: StepPlan, indices: list[int]) -> Part:
        """Return the part that computes these rows of the plan in one forward."""
        slots = [r.lora_slot for r in plan.rows]
        indices = sorted(indices, key=slots.__getitem__)  # adjacent rows of one adapter are faster
        rows = [plan.rows[i] for i in indices]
        verifies = any(r.kind is RowKind.VERIFY or r.slack for r in rows)  # one kind of steps, so that few are traced
        mixed = verifies or any(r.piggybacked for r in rows)
        whole = rows
        if mixed:
            indices, rows = token_by_token(indices, rows)
        longest = max([len(r.tokens) for r in rows])
        length = 1 if longest == 1 else padded_length(longest)
        count = row_count(coarse_count(len(rows)) if mixed else len(rows), self._good_counts(length))
        pools = range(len(self._pool.windows))
        in_place = tuple(self._contiguous(rows, pool) for pool in pools)
        common_offset = self._common_offset(rows)
        width_of = coarse_width if mixed else table_width
        widths = tuple(width_of(most_blocks_read(rows, self._block_size, window)) for window in self._pool.windows)
        padding = self._seats.padding
        seats = [r.seat if r.sample else padding for r in rows] + [padding] * (count - len(rows))
        picked = [at for at, seat in enumerate(seats) if seat < padding] if mixed else []
        pads = max(min(coarse_count(len(picked)), padding) - len(picked), 0)
        drawn_seats = [seats[at] for at in picked] + [padding] * pads if picked else seats
        samples = min(seats) < padding
        flags, sampling = self._sampling(tuple(drawn_seats), mixed) if samples else (SamplingFlags(), [])
        adapter_slots = [slots[i] for i in indices]
        route = self._lora.route(adapter_slots + [adapter_slots[-1]] * (count - len(rows)), length)
        tokens, offset, places, last = self._index_arrays.of(rows, count, length, widths, verifies)
        carry = verifies or (length == 1 and any(r.tokens[0] == CARRY for r in rows))
        scores = self._seats.scores([r.seat for r in rows]) if rows[0].targets else -1
        seat_array = self._index_arrays.once(("seats", tuple(seats)), lambda: np.array(seats, np.int32))
        numbers = [tokens, offset, last, seat_array, *places]
        if verifies:
            bounds = [plan.rows[i].start if plan.rows[i].slack else -1 for i in indices]
            numbers.append(np.array(bounds + [-1] * (count - len(rows)), np.int32))
        if scores >= 0:
            numbers.append(padded([r.targets for r in rows], count, length))
        if picked:
            numbers += [np.array(picked + [0] * pads, np.int32), np.array(drawn_seats, np.int32)]
            indices, rows = [indices[at] for at in picked], [rows[at] for at in picked]
        drafts = drafts_of([r for r in whole if r.sample], len(drawn_seats)) if verifies else []
        numbers += drafts
        if route.ids is not None:
            numbers.append(route.ids)
        gathered = tuple(0 if run else width for run, width in zip(in_place, widths, strict=True))
        picks = len(drawn_seats) if picked else 0
        most = drafts[0].shape[1] if drafts else 0
        masked = bool(plan.masked) and not set(plan.masked).isdisjoint(indices)
        pooled, layout = rows[0].pooling is not None, route.layout
        key = StepKey(
            count,
            length,
            gathered,
            carry,
            samples,
            flags,
            layout,
            common_offset,
            scores,
            picks,
            most,
            pooled,
            masked,
        )
        # These steps are of too many kinds to trace each of them, or they pause.
        if any(in_place) or common_offset or self._is_long(key) or (mixed and not self._is_usual(key)):
            step = self._make_step(key, specs(numbers), in_place)
            self._first_uses += mixed
        else:
            found = self._steps.get(key)
            step = found or mx.compile(self._make_step(key, specs(numbers), in_place))
            if found is None:
                self._steps[key] = step
                self._first_uses += 1
                if len(self._steps) > MAX_COMPILED:
                    self._met.pop(self._steps.popitem(last=False)[0], None)
            self._steps.move_to_end(key)
        sent = self.inputs.send(numbers)
        drawn, scored, marker, self._last, moved, seen, self._pool.layers, self._order.zeros = step(
            sent.arrays,
            self._last,
            [self._places_of_last] if verifies else [],
            sampling,
            self._seats.seen(flags),
            route.arrays,
            self._pool.layers,
            self._order.zeros,
        )
        self._seats.remember(seen)
        self._move(moved)
        wanted = [self._seats.wanted_logprobs(r.seat) for r in rows] if flags.logprobs >= 0 else []
        wanted_scores = [self._seats.wanted_prompt_logprobs(r.seat) for r in rows] if scored and not pooled else []
        undrawn = None
        if masked:
            (logits, position, own, *behind), drawn = drawn, []
            undrawn = Undrawn(logits, position, own, flags, sampling, behind, indices, wanted, verifies)
        read = count * length
        return Part(indices, flags, drawn, marker, read, scored, wanted, wanted_scores, sent, undrawn, verifies, pooled)

    def _make_step(
        self, key: StepKey, expected: Sequence[ArraySpec], in_place: Sequence[tuple[int, int] | None]
    ) -> Callable[..., Any]:
        """Return the step as a pure function of arrays and lists of arrays.

        expected: the specs of its inputs, which follow from the key; in_place: block ranges, as in `_contiguous`.
        """
        model, caches, lora, head, angles = self._model, self._caches, self._lora, self._head, self._angles
        merged, draw = self._merged, drawing(key.flags, self._greedy, self._seats.padding)
        windows, pool_of = self._pool.windows, self._pool.pool_of

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
            tokens, offset, last, seats, *rest = receive(inputs, expected)
            places, rest = rest[: 2 * len(windows)], rest[2 * len(windows) :]
            if key.drafts:
                offset = settled(offset, rest.pop(0), last_places[0][seats])
                places = places_at(offset, places, windows, self._block_size)
            tokens = after(order, tokens)  # everything in the forward depends on the tokens
            targets = rest.pop(0) if key.scores >= 0 else None
            picked, drawn_seats = (rest.pop(0), rest.pop(0)) if key.picks else (None, seats)
            drafts, rest = (rest[:3], rest[3:]) if key.drafts else ([], rest)
            ids = rest.pop(0) if rest else None
            if key.carry:
                tokens = mx.where(tokens == CARRY, last_tokens[seats][:, None], tokens)
            views = self._views(key, offset, places, in_place)
            for cache, arrays, own in zip(caches, pool, pool_of, strict=True):
                cache.bind(arrays, views[own])
            lora.bind(lora_arrays, ids, layout=key.layout)
            head.keep(last if key.length > 1 and targets is None else None, picked, hidden=key.pooled)
            try:
                with cpu.serving():
                    output = model(tokens, cache=caches)
                logits = head.logits(output, last)
            finally:
                lora.unbind()
                head.keep(None)
                if angles is not None:
                    angles.clear()
                for whole in merged:
                    whole.clear()
                pool = [cache.release() for cache in caches]
            scored = head.pooled(last) if key.pooled else [] if targets is None else score(output, targets, key.scores)
            order = [zero_of([logits])] if order else []
            if not key.samples:
                return [], scored, [*(scored or [logits[:1, :1]]), *order], last_tokens, [], [], pool, order
            position = offset + last + 1
            position = position if picked is None else position[picked]
            if key.masked:
                undrawn = [logits, position, drawn_seats + 0, *(array + 0 for array in drafts)]
                return undrawn, scored, [*undrawn, *scored, *order], last_tokens, [], [], pool, order
            drawn = draw(logits, position, drawn_seats, last_tokens, sampling, seen, drafts, last_places)
            outputs, last_tokens, known, moved = drawn
            marker = [*outputs, *scored, last_tokens, *moved, *order]
            return outputs, scored, marker, last_tokens, moved, known, pool, order

        return step

    def _views(
        self,
        key: StepKey,
        offset: mx.array,
        places: Sequence[mx.array],
        in_place: Sequence[tuple[int, int] | None],
    ) -> list[StepView]:
        """Return what the layers of each pool share in a forward."""
        return [
            StepView(
                offset,
                *places[2 * i : 2 * i + 2],
                num_blocks=self._pool.pools[i].num_blocks,
                block_size=self._block_size,
                mask_axes=self._mask_axes,
                kept=self._pool.windows[i],
                in_place=in_place[i],
                common_offset=key.common_offset,
                pause=PAUSE if self._is_long(key) else 0,
            )
            for i in range(len(in_place))
        ]

    def _is_usual(self, key: StepKey) -> bool:
        """Count a kind of step; return whether it is traced already or has run often enough to be worth tracing."""
        if len(self._met) >= MET:
            self._met.clear()
        self._met[key] += 1
        return key in self._steps or self._met[key] > USUAL

    def _is_long(self, key: StepKey) -> bool:
        """Return whether the forward pauses for the device; such a forward is not traced."""
        return self._may_pause and key.rows * key.length >= LONG_TOKENS

    @property
    def _may_pause(self) -> bool:
        """Whether long forwards pause; with one part at a time, earlier parts may not be dispatched yet."""
        return self.pauses and not self.one_at_a_time

    def _common_offset(self, rows: list[Row]) -> int | None:
        """Return the `common_offset` of `StepView` for rows of one forward."""
        start, length = rows[0].start, len(rows[0].tokens)
        worth = length > max(1, self._fused_length) if start == 0 else len(rows) == 1 and length >= COMMON_OFFSET_TOKENS
        return start if self.common_offsets and worth and all(r.start == start for r in rows) else None

    def _contiguous(self, rows: list[Row], pool: int) -> tuple[int, int] | None:
        """Return the range (first, end) of pool-local blocks that a single chunk can read in place; else None."""
        if len(rows) > 1 or len(rows[0].tokens) <= max(1, self._fused_length):
            return None
        store, _, by_outputs = inplace.writing()
        if by_outputs or (store is not None and self._common_offset(rows) is None):
            return None  # arrays that kernels write are read by index
        n = blocks_read(rows[0], self._block_size, self._pool.windows[pool])
        if n < VIEW_BLOCKS:
            return None
        table = self._index_arrays.table(rows[0], pool, n)
        if table[n - 1] - table[0] != n - 1 or table != list(range(table[0], table[0] + n)):
            return None
        return table[0], table[0] + n

    def _sampling(self, seats: tuple[int, ...], mixed: bool) -> tuple[SamplingFlags, list[mx.array]]:
        """Return sampling flags and arrays of these seats, which are made anew only when a seat changes."""
        key = (self._seats.generation, seats, mixed)
        made = self._recent.get(key)
        if made is None:
            flags = self._seats.flags(seats, coarse_count if mixed else row_count)
            made = self._recent[key] = flags, self._seats.arrays(seats, flags).flatten()
            if len(self._recent) > KEPT_SAMPLING:
                self._recent.popitem(last=False)
        self._recent.move_to_end(key)
        return made

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> list[Part]:
        """Return a part that reads blocks and one that writes them; in a single part, the write would copy the pool."""
        return [Part([], SamplingFlags(), [], arrays) for arrays in self._pool.copy(copies)]

    def _save_blocks(self, blocks: Sequence[int]) -> list[Part]:
        """Return a part that reads blocks; `KVPools.bytes_of` makes bytes of its marker when it is done."""
        return [Part([], SamplingFlags(), [], self._pool.read(blocks), saves=tuple(blocks))]

    def _load_blocks(self, loads: Sequence[tuple[int, Bytes]]) -> list[Part]:
        """Return a part that writes blocks."""
        return [Part([], SamplingFlags(), [], self._pool.write(loads))]
