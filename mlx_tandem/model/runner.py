"""The MLX runner: it executes step plans over the paged pool with mlx-lm's unmodified model modules.

The rarer a feature is, the better it is hidden: what is for one device or for few steps stays in a module of its own,
and neither the plan nor the engine knows of it.

A step is cut into rectangles of rows of one length: decoding rows with the rows that share their forward, and prompt
chunks by padded length. Each rectangle is one call of a pure function of arrays, compiled for each shape. The modules
of `model/step` each do one thing for it: `rows` divides, `forward_inputs` makes the numbers, `forward` is the function,
`compiled` keeps it, and `parts` bring it to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.budget import UNLIMITED, StepLimits
from mlx_tandem.engine.plan import LONGEST_READ, DeviceError, Mask, RowKind, StepPlan, StepResult
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.model import backend, compiler
from mlx_tandem.model.cache.kvformat import LayerShape
from mlx_tandem.model.cache.pools import KVPools
from mlx_tandem.model.cache.states import StateCache, StateShape
from mlx_tandem.model.cache.turns import HeldStates
from mlx_tandem.model.inputs import Inputs, Numbers, Sent
from mlx_tandem.model.loader import LoadedModel
from mlx_tandem.model.ops.attention.cache import LayerKernels, PagedCache
from mlx_tandem.model.ops.attention.ordered import OrderedAttention
from mlx_tandem.model.ops.attention.paged import EVERYTHING, MOST_QUERIES
from mlx_tandem.model.ops.lora.state import LoraState
from mlx_tandem.model.ops.sampling.masks import MaskTable, places_of_rows
from mlx_tandem.model.ops.sampling.sampler import MLX_PICKERS, Pickers
from mlx_tandem.model.step import pauses
from mlx_tandem.model.step.compiled import USUAL, CompiledSteps
from mlx_tandem.model.step.draw import Undrawn
from mlx_tandem.model.step.forward import Forward, StepArrays
from mlx_tandem.model.step.forward_inputs import ForwardInputs, InputBuilder
from mlx_tandem.model.step.index_arrays import IndexArrays
from mlx_tandem.model.step.operands import StepKey
from mlx_tandem.model.step.parts import DispatchQueue, Flight, Part, copying, keeping, loading, putting, saving
from mlx_tandem.model.step.pauses import NO_PAUSE, Pause
from mlx_tandem.model.step.prebuilt import Prebuilt, RepeatableForward, StepCall
from mlx_tandem.model.step.rows import Rectangles
from mlx_tandem.model.step.seats import Seats
from mlx_tandem.model.vision.embeddings import Embeddings
from mlx_tandem.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class RunnerSizes:
    """The sizes of a runner's pools and steps.

    Attributes:
        num_blocks: The blocks of each pool, as `KVPools` takes them.
        mask_axes: As in `PoolLayout`.
        limits: The most positions and pairs of query and key of one forward.
        row_counts: Numbers of rows, ascending, to which decoding rows are padded; beyond them `shapes.row_count`
            decides.
    """

    vocab_size: int
    num_blocks: Sequence[int]
    block_size: int
    max_num_seqs: int
    mask_axes: int
    limits: StepLimits = UNLIMITED
    row_counts: Sequence[int] = ()


class _Waiting(NamedTuple):
    """The rows of the newest plan that have not drawn because their masks are missing.

    `masked` has their indices in the plan, and `undrawn` an entry for each forward.
    """

    masked: tuple[int, ...]
    undrawn: list[Undrawn]


class MLXRunner:
    """The runner of a loaded model.

    `weights` maps the digests that `StepPlan.uploads` may name to adapters; the owner keeps it current. `attention` has
    for each layer the kernels that answer few queries, or None for the portable back end; empty: None for all layers.
    `states` has what each recurrent layer keeps.

    Attributes:
        module: The model's modules as they are served, with everything that was changed in them.
        pauses: When forwards wait for the device while they are built; None: never.
        prebuilt: The next step, if it was built while the device computes the one before it.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: Sequence[LayerShape],
        lora: LoraState,
        weights: Mapping[str, AdapterWeights],
        sizes: RunnerSizes,
        attention: Sequence[LayerKernels | OrderedAttention | None] = (),
        pickers: Pickers = MLX_PICKERS,
        states: Sequence[StateShape] = (),
    ):
        attention = attention or [None] * len(layers)
        caches = [PagedCache(*each) for each in zip(layers, attention, strict=True)]
        self.module = model.module
        self._lora = lora
        self._weights = weights
        self._embeddings = Embeddings(model.encoder)
        self._seats = Seats(sizes.max_num_seqs, sizes.vocab_size)
        self._order = lora.order  # adapters' slots are written in place as well
        self._pool = KVPools(layers, sizes.num_blocks, sizes.block_size, self._order, states)
        windows, fused = self._pool.windows, _fused_length(attention)
        self.rectangles = Rectangles(
            sizes.block_size, windows[0], fused, sizes.limits, sizes.row_counts, unpadded=bool(states)
        )
        mtp = model.mtp is not None
        self._index_arrays = IndexArrays(sizes.max_num_seqs, sizes.block_size, self._pool.firsts, windows)
        self._builder = InputBuilder(
            self._seats,
            lora,
            self._index_arrays,
            self.rectangles,
            windows,
            sizes.block_size,
            mtp=mtp,
            images=model.encoder is not None,
        )
        self._forward = Forward(
            model,
            caches,
            lora,
            self._pool,
            sizes.mask_axes,
            pickers,
            nobody=self._seats.padding,
            states=[StateCache(shape) for shape in states],
        )
        self.rectangles.gathered_share = self._forward.gathered_share
        self.rectangles.groups = any(isinstance(own, LayerKernels) and own.grouped is not None for own in attention)
        # A step that draws several tokens a row holds the gathered keys and values of all layers at once.
        limits = sizes.limits
        most = min(limits.positions // max(len(layers), 1), limits.pairs // LONGEST_READ)
        self.drafting_positions = most if self._forward.chains else 0
        self.compiled = CompiledSteps(self._forward)
        self.inputs = Inputs()
        self.prebuilt = Prebuilt(self.inputs, _dispatch if backend.current().steps.may_wait_for_numbers else None)
        self._masks, self._waiting = MaskTable(sizes.vocab_size, sizes.max_num_seqs), _Waiting((), [])
        self.queue, self.pauses = DispatchQueue(), pauses.of_device(limits, len(layers))
        self._last, self._places_of_last = self._seats.no_tokens(), self._seats.no_tokens()
        _keep_order(self, caches)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the KV pools."""
        return self._pool.nbytes

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, the input of the output head; 0 if no step has shown it."""
        return self._forward.head.width

    @property
    def compiled_steps(self) -> int:
        """Number of compiled steps that are kept now."""
        return len(self.compiled.kept())

    @property
    def ranks(self) -> int:
        """Number of ranks that compute the steps; blocks that are saved and loaded have the parts of all."""
        return 1

    # the Runner protocol

    @property
    def one_at_a_time(self) -> bool:
        """Whether a part is dispatched only when the part before it is done; see `DispatchQueue`."""
        return self.queue.one_at_a_time

    @one_at_a_time.setter
    def one_at_a_time(self, value: bool) -> None:
        self.queue.one_at_a_time = value

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Flight:
        """Build and dispatch the parts of a step; return a handle. Raises DeviceError.

        on_built: is called when the last rectangle is built, before its parts are dispatched.
        """
        try:
            self.prebuilt.begin(plan)
            # Reads of saved blocks are dispatched before anything that writes the pool.
            parts = saving(self._pool, plan.saves) if plan.saves else []
            for slot, digest in plan.uploads:
                if self._lora.grows(self._weights[digest]):
                    self.compiled.clear()
                self._lora.install(slot, self._weights[digest])
            first_uses = self.compiled.first_uses
            parts += copying(self._pool, plan.copies) if plan.copies else []
            parts += loading(self._pool, plan.loads) if plan.loads else []
            for seating in plan.seatings:
                self._seats.take(seating)
                self._index_arrays.forget(seating.seat)
            unencoded = self._encode(plan)
            self.queue.add(*parts)  # a part that pauses reads and writes the pool while it is built
            self._waiting = _Waiting(plan.masked, [])
            divided = self.rectangles.of_drafting if plan.drafts else self.rectangles.of
            rectangles = divided(plan.rows)
            for rows in rectangles:
                built = self._build_parts(plan, rows)
                parts += built
                self._waiting.undrawn.extend([part.undrawn for part in built if part.undrawn is not None])
                if on_built is not None and rows is rectangles[-1]:
                    on_built()
                self.queue.add(*built)
        except Exception as e:
            raise compiler.device_error(e) from e
        flight = Flight(plan, parts, first_use=self.compiled.first_uses != first_uses, unencoded=unencoded)
        self.prebuilt.end(flight)
        return flight

    def launch_waits(self, plan: StepPlan) -> bool:
        """Return whether `launch` may pause for the device because of an image or of long prompts."""
        if plan.encodes:
            return True
        if self.pauses is None:
            return False
        prompts = sum(len(r.tokens) for r in plan.rows if r.kind is RowKind.PROMPT and not r.piggybacked)
        fused = self.rectangles.fused_length
        gathered = sum(r.start + len(r.tokens) for r in plan.rows if len(r.tokens) > fused and not r.piggybacked)
        return self.pauses.may_be(prompts, gathered)

    def place(self, masks: list[list[Mask]]) -> list[list[Numbers]]:
        """Return for each draw of the newest plan the numbers to send: the indices of its rows' masks in the table, and
        for the first draw also the new masks (`Placed.new`).
        """
        placed = self._masks.place(masks)
        own = dict(zip(self._waiting.masked, placed.places, strict=True))
        numbers = [[places_of_rows(each.rows, len(each.logits), own)] for each in self._waiting.undrawn]
        numbers[0] += placed.new
        return numbers

    def sample(self, handle: Flight, masks: list[list[Numbers]]) -> None:
        """Let the masked rows of the newest plan draw. Raises DeviceError."""
        waiting, self._waiting = self._waiting, _Waiting((), [])
        try:
            for undrawn, numbers in zip(waiting.undrawn, masks, strict=True):
                part = self._draw(undrawn, numbers)
                handle.parts.append(part)
                self.queue.follow(part)
                if undrawn.held is not None:
                    handle.parts.append(self._keep(undrawn.held))
                    self.queue.add(handle.parts[-1])
        except Exception as e:
            raise compiler.device_error(e) from e

    def drawn(self, handle: Flight) -> list[tuple[int, ...]]:
        """Wait until the rows of a step have drawn; return their tokens. Raises DeviceError."""
        tokens: list[tuple[int, ...]] = [()] * len(handle.plan.rows)
        try:
            for part in handle.parts:
                if part.drawn:
                    mx.eval(part.drawn[0])
                    part.take_drawn(handle.plan, tokens)
        except Exception as e:
            raise compiler.device_error(e) from e
        return tokens

    def wait(self, handle: Flight) -> StepResult:
        """Wait until all parts of a step are done; return its result. Raises DeviceError."""
        plan = handle.plan
        tokens: list[tuple[int, ...]] = [()] * len(plan.rows)
        logprobs: list[tuple[TokenLogprob, ...] | None] = []
        scores: dict[int, list[TokenLogprob]] = {}
        pooled: dict[int, list[float]] = {}
        saves: list[bytes] = []
        drafts: dict[int, int] = {}
        try:
            self._build_behind(handle)
            for part in handle.parts:
                self._finish(part)
                if part.saves:
                    saves = self._pool.bytes_of(part.marker, part.saves)
                if part.is_pooled:
                    pooled |= part.pooled(plan)
                elif part.scored:
                    scores |= part.scores(plan)
                if not part.drawn:
                    continue
                part.take_drawn(plan, tokens)
                if part.drafts:
                    drafts |= part.drafted(plan, tokens)
                if part.flags.logprobs >= 0:
                    logprobs = logprobs or [None] * len(tokens)
                    for i, found in part.logprobs(plan).items():
                        logprobs[i] = found[: len(tokens[i])]
            for part in handle.parts:
                if part.sent is not None:
                    self.inputs.done(part.sent)
            self.prebuilt.passed()
        except DeviceError:
            raise
        except Exception as e:
            raise compiler.device_error(e) from e
        return StepResult(tokens, logprobs, scores, saves, handle.first_use, pooled, drafts, handle.unencoded)

    def reset(self) -> None:
        """Drop everything in flight, all compiled steps and all contents of the pool, after a failed step."""
        self.compiled.reset()
        self.prebuilt.reset()
        self._index_arrays.clear()
        self._seats.reset()
        self._masks.clear()
        self._waiting = _Waiting((), [])
        self.queue.clear()
        self._lora.unbind()
        self._forward.head.keep(None)
        self._order.reset()
        self._last, self._places_of_last = self._seats.no_tokens(), self._seats.no_tokens()
        self._embeddings.clear()
        self._pool.clear()  # last, since arrays of a lost step hold the old pool

    # a step

    def _encode(self, plan: StepPlan) -> dict[bytes, str]:
        """Encode the plan's images and drop others, as it says; return why images could not be encoded, by digest."""
        self._embeddings.drop(plan.drops)
        unencoded = {}
        for image in plan.encodes:
            try:
                self._embeddings.encode(image)
            except InvalidRequest as e:
                unencoded[image.digest] = e.message
            except RuntimeError as e:  # MLX's own error, for example for too little memory
                unencoded[image.digest] = f"the image could not be encoded ({e})"
        return unencoded

    def _build_parts(self, plan: StepPlan, indices: Sequence[int]) -> list[Part]:
        """Return the part that computes these rows of the plan in one forward, and the part that writes their states.

        Where a kernel writes states, the forward does.
        """
        given = self._builder.build(plan, indices)
        key, numbers = given.key, given.operands.flatten()
        pause = self._pause(key)
        if pause.layers and self.one_at_a_time:
            self.queue.finish()  # this forward uses the pool while it is built
        # The code of most recurrent layers loops over the tokens of a chunk, which takes long to trace.
        loops = key.goes_on is not None and key.length > 1
        untraced = USUAL if loops else self.compiled.untraced if given.mixed else 0
        step = self.compiled.step(key, numbers, given.in_place, pause, untraced=untraced)
        call = StepCall(step, numbers, self._arguments(given), self._forward.reported(key))
        sent, results = self.prebuilt.results(call)
        made = StepArrays(*results)
        self._last, self._pool.layers, self._order.zeros = made.last_tokens, made.pool, made.order
        self._seats.remember(made.known)
        self._move(made.moved)
        self.prebuilt.note(RepeatableForward(step, numbers, given) if self._may_repeat(given) else None)
        held = None
        if key.turns is not None:
            assert given.turns is not None
            held = HeldStates(key.turns, given.turns, made.lines[:-1], made.lines[-1])
        parts = [self._part(given, made, sent, held)]
        if held is not None:
            parts += [] if key.masked else [self._keep(held)]
        elif made.lines:
            parts += putting(self._pool, given.operands.states[-1], made.lines)
        return parts

    def _arguments(self, given: ForwardInputs) -> tuple[Any, ...]:
        """Return the arguments of a forward other than its numbers, from the present state of the runner."""
        key = given.key
        return (
            self._last,
            [self._places_of_last] if given.verifies else [],
            given.sampling,
            self._seats.seen(key.flags),
            given.route.arrays,
            self._pool.layers,
            self._order.zeros,
            self._embeddings.of(given.every, key.rows, key.length) if key.images or key.shifted else [],
        )

    def _may_repeat(self, given: ForwardInputs) -> bool:
        """Return whether a step like this one is likely to come next and can be built before its numbers are known."""
        key = given.key
        is_plain = not (key.masked or key.images or key.shifted) and self.compiled.has(key)
        return self.prebuilt.may_build and given.verifies and is_plain

    def _build_behind(self, flight: Flight) -> None:
        """Build a step like `flight`, if no later step is in flight and the next one is likely to be of its kind.

        Dispatch it as well if it can wait on the device for its numbers, unless a sequence is near its end: the next
        step may then be of another kind, and the device would have computed this one for nothing.
        """
        forward, plan = self.prebuilt.take_repeatable(flight), flight.plan
        if forward is not None:
            given = forward.given
            call = StepCall(forward.step, forward.numbers, self._arguments(given), self._forward.reported(given.key))
            alone = not (self.one_at_a_time or plan.saves or self._seats.near_end(plan.rows))
            self.prebuilt.build(call, dispatches=alone and forward.can_wait)

    def _keep(self, held: HeldStates) -> Part:
        """Return the part that writes the states after accepted drafts, when these are drawn."""
        sent = self.inputs.send(held.numbers.for_keeping())
        return keeping(self._pool, held, self._places_of_last, self._index_arrays.block_size, sent)

    def _part(self, given: ForwardInputs, made: StepArrays, sent: Sent, held: HeldStates | None) -> Part:
        """Return the part of a step's results, with what its seats want of them."""
        key, rows, flags, drawn = given.key, given.rows, given.key.flags, made.drawn
        wanted = [self._seats.wanted_logprobs(r.seat) for r in rows] if flags.logprobs >= 0 else []
        scores = [self._seats.wanted_prompt_logprobs(r.seat) for r in rows] if made.scored and not key.pooled else []
        undrawn = None
        if key.masked:
            (logits, position, seats, *drafts), drawn = drawn, []
            undrawn = Undrawn(
                logits, position, seats, flags, given.sampling, drafts, given.indices, wanted, given.verifies, held
            )
        return Part(
            given.indices,
            flags,
            drawn,
            made.marker,
            key.rows * key.length if key.length > 1 and not key.chained else 0,
            made.scored,
            wanted,
            scores,
            sent,
            undrawn,
            given.verifies,
            key.pooled,
            drafts=made.drafts,
        )

    def _draw(self, undrawn: Undrawn, numbers: Sequence[Numbers]) -> Part:
        """Return the part that draws, by masks, for the rows that a forward left undrawn.

        numbers: what `place` has returned for these rows.
        """
        flags, (_, *new) = undrawn.flags, numbers
        sent = self.inputs.send(numbers)
        drawn, self._last, seen, moved, table = self.compiled.drawing(flags, len(new[0]) if new else 0)(
            undrawn.logits,
            undrawn.position,
            undrawn.seats,
            self._last,
            undrawn.sampling,
            self._seats.seen(flags),
            undrawn.drafts,
            [self._places_of_last] if undrawn.drafts else [],
            [self._masks.array],
            sent.arrays,
        )
        self._seats.remember(seen)
        self._move(moved)
        self._masks.keep(table)
        marker = [*drawn, self._last, *moved, *table]
        return Part(undrawn.rows, flags, drawn, marker, sent=sent, wanted=undrawn.wanted, verifies=undrawn.verifies)

    def _move(self, moved: Sequence[mx.array]) -> None:
        """Take in where each seat's newest token is after a step with drafts."""
        if moved:
            (self._places_of_last,) = moved

    def _finish(self, part: Part) -> None:
        """Wait until a part is done, check its gate, and dispatch the next part."""
        mx.eval(part.marker)
        if self.one_at_a_time and backend.current().steps.lets_go_late:
            mx.synchronize()
        if part.sent is not None and not self.inputs.came_in_time(part.sent):
            self.prebuilt.stalled()
            raise DeviceError("the device began a step before its numbers were written", again=True)
        self.queue.done(part)

    def _pause(self, key: StepKey) -> Pause:
        """Return how a forward waits for the device while it is built."""
        if self.pauses is None:
            return NO_PAUSE
        gathers = key.length > self.rectangles.fused_length
        positions = key.rows // key.each * max(key.widths) * self._index_arrays.block_size if gathers else 0
        return self.pauses.of(key.rows, key.length, positions)


def _keep_order(runner: MLXRunner, caches: Sequence[PagedCache]) -> None:
    """Turn off what computes a number differently in another step, if the caches keep an order of sums."""
    if not any(cache.keeps_order for cache in caches):
        return
    runner.rectangles.common_offsets = False
    if not backend.current().arithmetic.fusing_keeps_bits:
        runner.compiled.compiles, runner.compiled.untraced = False, 0


def _fused_length(attention: Sequence[LayerKernels | OrderedAttention | None]) -> int:
    """Return up to how many tokens per row kernels of all layers read the pool in place."""
    if not attention or not all(attention):
        return 0
    if any(isinstance(own, OrderedAttention) for own in attention):
        return EVERYTHING if all(isinstance(own, OrderedAttention) and own.kernel for own in attention) else 0
    return MOST_QUERIES


def _dispatch(results: Any) -> None:
    """Dispatch a step that was built. Dispatching its part later does nothing more."""
    mx.async_eval(StepArrays(*results).marker)
