"""The scheduler: it decides what the device does next, and owns the sequences, their seats and adapter slots.

A sequence waits, runs, and ends. Each plan gives every running sequence that can decode one row, and spends a time
budget on chunks of the prompts that are being read. When the pool is full, the sequence that matters least (the
youngest of the largest priority value) gives its blocks back and is computed again later from its tokens (preemption by
recompute).

Rows made for training come after users' rows everywhere, and a plan can leave them out; a user's request that waits
takes their seats, blocks and slots at once. A request that follows its adapter continues under a newer version with the
keys and values it has.

A plan may be made while the plan before it is still on the device. Tokens drawn there are `pending` until
`update_from_output`. While drafts are on the device, the scheduler counts as if they were accepted; the device knows
where the next row of their sequence begins. A plan's masks are made when the plan before it has been taken in.
(docs/decisions/step-contract.md)
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.abandoned import AbandonedPrefills
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import UNLIMITED, StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.drafting import Drafting, predicted_of
from mlx_tandem.engine.fair_turns import ReadingOrder
from mlx_tandem.engine.images import Images, Work, shift_at, shown
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.late_rows import LateRows
from mlx_tandem.engine.masks import MaskMaker, masks_of_plan
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import CARRY, NOT_A_NUMBER, UNKNOWN, Mask, Row, RowKind, StepPlan, StepResult
from mlx_tandem.engine.prefill import Chunk, Prefill
from mlx_tandem.engine.request_check import check_request
from mlx_tandem.engine.run_queue import RunQueue
from mlx_tandem.engine.sequence import Sequence, sequences_of
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.kv.prefix import PrefixCounts
from mlx_tandem.types import AdapterRef, Delta, Request, TokenLogprob

_CARRIED = (CARRY,)

_NOTHING: Mapping[int, tuple[int, ...]] = MappingProxyType({})

_PROMPT, _DECODE, _VERIFY = RowKind  # looking up a name of the module is faster than a member of an enumeration


class Scheduler:
    """The sequences of all open requests, and the plans of steps made for them. Touches no array."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        slots: SlotTable,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: StepLimits = UNLIMITED,
    ):
        self._config = config
        self._blocks = blocks
        self._slots = slots
        self._max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self.prefill = Prefill(config, limits, vocab_size, self._chunk)
        self.drafting = Drafting(blocks, vocab_size, config.max_num_seqs)
        self.mask_maker: MaskMaker | None = None  # the owner sets it before the first request
        self.images: Images | None = None  # the owner sets it before the first request; None: none are served
        self.queue = RunQueue(config, blocks, slots)
        self._abandoned = AbandonedPrefills(blocks)
        self._late = LateRows(self.queue, vocab_size)
        self._reading = ReadingOrder()
        self._sequences: dict[int, Sequence] = {}
        self._choices: dict[int, dict[int, Sequence]] = {}  # by request id
        self._background: set[int] = set()  # requests made for training
        self._started: list[tuple[int, float]] = []  # for the next `take_events`
        self.abandoned_ended = False  # whether a sequence has ended whose client had left; the owner resets it
        self._next_id = self._num_masked = 0  # the latter counts open choices
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for one that could never run."""
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        most = min(self._max_model_len, self._blocks.longest)
        check_request(request, stop_ids, vocab_size=self.vocab_size, most_tokens=most, most_choices=self.max_num_seqs)
        if request.adapter is not None and self._slots.n == 0:
            raise InvalidRequest("this server holds no adapters: max_loras is 0", param="model")
        if request.id in self._choices:
            raise InvalidRequest(f"request {request.id} exists", param="id")
        if request.images and self.images is None:
            raise InvalidRequest("this server takes no images with this model", param="images")
        runs = () if self.images is None else self.images.runs(request)
        maker = self.mask_maker
        is_masked = maker is not None and maker.constrains(request)
        choices = sequences_of(request, self._next_id, stop_ids, is_masked, runs)
        self._next_id += request.n
        self._num_masked += is_masked and request.n
        self._sequences |= {s.id: s for s in choices}
        self._choices[request.id] = {s.choice: s for s in choices}
        if request.background:
            self._background.add(request.id)
        if is_masked and maker is not None:
            for s in choices:
                self._late.prepare(maker, s)
        self.queue.add(choices[0])
        self._blocks.read_ahead(choices[0])
        self.prompt_tokens += len(request.prompt)

    def cancel(self, request: int, choice: int | None = None, *, keep: bool = False) -> None:
        """End a request or one choice of it; it has no more deltas. Unknown ids are ignored.

        With `keep`, a sequence that was reading its prompt stays for one more token, so that others find what it read.
        """
        choices = self._choices.get(request, {})
        for s in reversed(list(choices.values())):  # the siblings of the first come before it
            if choice is not None and s.choice != choice:
                continue
            if keep and self._abandoned.keep(s):
                self.drafting.forget(s)
            else:
                self._end(s)

    def follow(self, ref: AdapterRef) -> list[int]:
        """Let requests that follow `ref.name` continue under `ref` from their next row on, once it has a slot.

        Return their ids. Sequences that wait begin under it; what they computed before a preemption is computed again
        under it.
        """
        followers = [s for s in self._sequences.values() if s.follows(ref)]
        for s in followers:
            if s.seat < 0:
                self._blocks.forget(s)
                s.go_under(ref)
            else:
                s.next_adapter = ref
                self.queue.follow(s)
        return list(dict.fromkeys(s.request.id for s in followers))

    def digests(self, request: int) -> set[str]:
        """Return the digests of adapters that the sequences of a request run under now or will run under."""
        refs = [r for s in self._choices.get(request, {}).values() for r in (s.adapter, s.next_adapter)]
        return {ref.digest for ref in refs if ref is not None}

    @property
    def has_users(self) -> bool:
        """Whether a user's request is open: one that was not made for training."""
        return len(self._choices) > len(self._background)

    @property
    def has_background(self) -> bool:
        """Whether a request made for training is open."""
        return bool(self._background)

    @property
    def requests(self) -> Collection[int]:
        """Ids of the open requests."""
        return self._choices.keys()

    @property
    def offload(self) -> KVOffload | None:
        """The KV offload, if there is one."""
        return self._blocks.offload

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counters of the prefix cache."""
        return self._blocks.prefix_counts

    @property
    def max_num_seqs(self) -> int:
        """Number of sequences that may run at once."""
        return self._config.max_num_seqs

    def take_events(self) -> tuple[list[tuple[int, float]], list[int]]:
        """Return requests whose first row was planned since the last call, and requests preempted since then.

        The former come once each, with the time in seconds of the monotonic clock, the latter once for each preemption.
        """
        started = self._started
        if started:
            self._started = []
        return started, self.queue.take_preempted()

    def plan(self, background: bool = True) -> StepPlan | None:
        """Return the next unit of device work, None when there is none now.

        Unless `background`, rows made for training are left out while users' requests are open.
        """
        left_out = set() if background or not self.has_users else self._background
        rows: list[Row] = []
        for s in self._abandoned.reserve_or_list_lost():
            self._end(s)
        self._blocks.poll()
        if self._num_masked:
            self._late.hold_back(self.mask_maker, self._sequences)
            self._late.resume(self.mask_maker)
        self.queue.move()
        self.queue.begin_waiting(left_out)
        loads = self._blocks.take_loads()
        for s in [s for s in self._wanted(left_out) if s.siblings and s.scheduled == s.prompt_length - 1]:
            self.queue.fork(s)
        drafting, late = self.drafting, self._late
        wanted = late.without_waiting(self.mask_maker, self._wanted(left_out))
        drafting.begin(self.queue.running, wanted)
        for s in wanted:
            # A row before this one may have taken the sequence's blocks, and then the sequence has lost its seat.
            if s.seat < 0 or not s.wants_decode or s.siblings or (s.pending and drafting.waits(s)):
                continue
            if not self.queue.reserve(s, s.scheduled + 1, rows):
                continue
            newest = _CARRIED if s.pending else (s.tokens[-1],)
            drafts = () if drafting.proposes is None or late.is_slow(s) else drafting.drafts(s, rows)
            rows.append(self._row(s, _VERIFY if drafts else _DECODE, newest + drafts))
        pictures = self._plan_prefill(rows, left_out)
        saves = self._blocks.take_saves()
        if not (rows or loads or saves or pictures.encodes):
            return None
        new = [s for s in self.queue.running if not s.is_seated]
        planned = {row.sequence for row in rows} if new else ()
        seatings = [s.take_seat() for s in new if s.id in planned]
        uploads = self.queue.take_uploads()
        constrained = enumerate(rows) if self._num_masked else ()
        masked = tuple([i for i, row in constrained if row.sample and self._sequences[row.sequence].is_masked])
        copies, proposes = self._blocks.writes.take_copies(), drafting.drafts_in_steps
        return StepPlan(tuple(rows), uploads, copies, tuple(seatings), saves, loads, masked, None, proposes, *pictures)

    def masks(self, plan: StepPlan, drawn: Mapping[int, tuple[int, ...]] = _NOTHING) -> list[list[Mask]]:
        """Return the masks for the newest plan, as `Runner.sample` takes them.

        drawn: by their sequence, the tokens that the plan before it has drawn, unless these have been taken in. Another
        thread may call this while nothing else is asked of the scheduler.
        """
        assert self.mask_maker is not None
        return self._late.take(plan, masks_of_plan(self.mask_maker, plan, self._sequences, self.vocab_size, drawn))

    def _wanted(self, left_out: Collection[int]) -> list[Sequence]:
        """Return the running sequences whose requests are not left out and whose blocks are loaded."""
        running = self.queue.running
        wanted = [s for s in running if s.request.id not in left_out] if left_out else running
        writes = self._blocks.writes
        return [s for s in wanted if not writes.is_loading(s.tables)] if writes.has_loads else list(wanted)

    def _chunk(self, s: Sequence, tokens: int) -> int:
        """Return how many of the next `tokens` of the prompt of `s` one row may have.

        All of a row's positions run under one adapter or the base.
        """
        if s.scheduled < s.adapter_start:
            tokens = min(tokens, s.adapter_start - s.scheduled)
        tokens = self._blocks.snapshots.chunk(s, tokens)
        return tokens if self.images is None or not s.runs else self.images.readable(s, tokens)

    def _plan_prefill(self, rows: list[Row], left_out: Collection[int]) -> Work:
        """Add the chunks of prompts for this plan to its rows; return what the plan does for images."""

        def take(s: Sequence, tokens: int, *, piggybacked: bool = False) -> Chunk | None:
            if s.seat < 0 or not self.queue.reserve(s, s.scheduled + tokens, rows):
                return None
            chunk = tuple(s.tokens[s.scheduled : s.scheduled + tokens])
            rows.append(self._row(s, _PROMPT, chunk, piggybacked))
            self._reading.took(s.request.client, tokens)
            return Chunk(padded_length(tokens) if rows[-1].targets else 0)

        reading = [s for s in self._wanted(left_out) if s.wants_prefill and s.seat >= 0]
        work = Work() if self.images is None else self.images.plan(reading)
        # A prompt whose next token belongs to an image that is not encoded waits.
        reading = [s for s in reading if not s.runs or self._chunk(s, 1)]
        self.prefill.plan(self._reading.of(reading), len(rows), take)
        return work

    def _row(self, s: Sequence, kind: RowKind, tokens: tuple[int, ...], piggybacked: bool = False) -> Row:
        """Return a row of `s` with these tokens at its next positions, and count them as scheduled."""
        start = s.scheduled
        if s.cached is None:
            self._start(s)
        slack = s.slack
        s.scheduled += len(tokens)
        sample = kind is not _PROMPT or s.scheduled == s.total
        if sample:
            s.pending += 1
        targets = s.targets(start, s.scheduled) if s.scores is not None else ()
        request, source = s.request, None
        if kind is _VERIFY:
            s.pending += len(tokens) - 1
            s.slack += len(tokens) - 1
            source = self.drafting.source(s)
        version = s.adapter.version if request.follow and s.adapter is not None else 0
        following = UNKNOWN if sample else s.tokens[s.scheduled]
        slot = s.slot if start >= s.adapter_start else 0
        own = kind, s.id, s.seat, slot, start, tokens, s.tables, sample, targets, version, request.background
        images = shown(s, start, s.scheduled) if s.runs and kind is _PROMPT else ()
        shift = shift_at(s, start) if s.runs else 0
        return Row(*own, piggybacked, slack, request.pooling, source, following, images, shift)

    def _start(self, s: Sequence) -> None:
        """Note that the first row of the request of `s` is planned."""
        self._blocks.count(s)
        for x in self._choices[s.request.id].values():
            x.cached = s.cached
        self._started.append((s.request.id, time.monotonic()))

    def _end(self, s: Sequence) -> None:
        """End a sequence, whether it waits or runs."""
        self._blocks.forget(s)
        self.abandoned_ended |= self._abandoned.drop(s)
        if s.is_masked and self.mask_maker is not None:
            self._num_masked -= 1
            self.mask_maker.forget(s.request.id, s.choice)
        self.drafting.forget(s)
        self._late.forget(s)
        choices = self._choices[s.request.id]
        del self._sequences[s.id], choices[s.choice]
        if not choices:
            del self._choices[s.request.id]
            self._background.discard(s.request.id)
        self.queue.remove(s, choices.values())

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in the result of a step and return its outcome. Sequences that ended meanwhile are skipped."""
        outcome = StepOutcome()
        sequences, deltas, logprobs, spoiled = self._sequences, outcome.deltas, result.logprobs, set[int]()
        if plan.masked:
            self._late.hold_back(self.mask_maker, sequences, plan)
        for i, (row, drawn) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            is_finite = not drawn or drawn[-1] != NOT_A_NUMBER
            if not is_finite:
                spoiled.update(*row.tables)
            s = sequences.get(row.sequence)
            if row.targets and s is not None and s.scores is not None:
                # After a preemption, a chunk may begin with positions whose scores are known.
                s.scores += result.scores[i][len(s.scores) - row.start :]
            if row.pooling is not None and s is not None:
                s.pool(row.start, result.pooled[i])
            if not row.sample or s is None:
                continue
            assert drawn, "a row that samples draws"
            if self._abandoned and self._abandoned.settle(s, is_finite=is_finite):
                self._end(s)
                continue
            if not is_finite:
                outcome.failed.append(s.request.id)
                for x in self._choices[s.request.id].values():
                    x.is_pure = False
                self.cancel(s.request.id)
                continue
            if plan.masked and self._late.drops(plan, s):
                continue
            s.pending -= 1
            if row.kind is _VERIFY:
                self.drafting.settle(s, row, len(drawn))
            known = logprobs[i] if logprobs else None
            if len(drawn) == 1:
                s.tokens.append(drawn[0])
                finish = s.finish_reason(drawn[0])
            else:
                drawn, finish = s.say(drawn)
                known = known[: len(drawn)] if known else None
            if not s.has_drawn and s.seat >= 0:
                self._blocks.publish(s)
            scores = self._hand_out_scores(s) if s.scores is not None else ()
            own = drawn, known, finish, scores, row.version, s.cached or 0
            predicted = predicted_of(row, result.tokens[i], drawn) if row.source == "prediction" else None
            deltas.append(Delta(s.request.id, s.choice, *own, s.embedding if row.pooling else b"", predicted))
            if finish:
                self._end(s)
            elif i in result.drafts:
                self.drafting.offer(s, result.drafts[i])
        self.generated_tokens += sum([len(delta.tokens) for delta in deltas])
        if plan.encodes:
            outcome.unencoded = self._fail_unencoded(plan, result)
        if plan.masked:
            self._late.prepare_all(self.mask_maker, sequences, plan)
        if spoiled:
            self._blocks.spoil(spoiled)
        if plan.saves:
            self._blocks.saved(result.saves)
        self.drafting.observe(plan, result)
        return outcome

    def _fail_unencoded(self, plan: StepPlan, result: StepResult) -> dict[int, str]:
        """End the requests with images that could not be encoded; return why, by the request."""
        assert self.images is not None
        self.images.done(plan, result.unencoded)
        if not result.unencoded:
            return {}
        why = {
            s.request.id: result.unencoded[run.image.digest]
            for s in self._sequences.values()
            for run in s.runs
            if run.image.digest in result.unencoded
        }
        for request in why:
            self.cancel(request)
        return why

    def _hand_out_scores(self, s: Sequence) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the prompt's tokens, once for each request."""
        scores = tuple(s.scores or ())
        for x in self._choices[s.request.id].values():
            x.scores = None
        return scores

    def fail(self, plans: Iterable[StepPlan], *, again: bool = False) -> list[int]:
        """Give up steps that were lost on the device; end the requests that had a row in them, and return these.

        With `again`, they are computed again and none is returned. Every other running sequence is computed again in
        any case, since nothing in the cache can be trusted.
        """
        plans = list(plans)
        for s in self._sequences.values():
            s.is_pure = s.seat < 0
        self._blocks.distrust()
        for s in self._abandoned.all():
            self._end(s)
        self._late.clear()
        if self.images is not None:
            self.images.clear()
        sequences = [self._sequences.get(row.sequence) for plan in plans for row in plan.rows]
        failed = [] if again else list(dict.fromkeys(s.request.id for s in sequences if s is not None))
        for request in failed:
            self.cancel(request)
        for s in self._sequences.values():
            s.pending = s.slack = 0  # tokens that were drawn in these steps are drawn again
        self.queue.fail([upload for plan in plans for upload in plan.uploads])
        return failed

    def check(self) -> None:
        """Assert the invariants; for tests, between steps."""
        self._blocks.check(self._sequences.values())
        self.queue.check(self._sequences.values())
        assert self._background == {s.request.id for s in self._sequences.values() if s.request.background}
