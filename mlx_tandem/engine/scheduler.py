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
from bisect import bisect_left, insort_left, insort_right
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType

from msgspec import structs

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import UNLIMITED, StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.drafting import Drafting, predicted_of
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.masks import MaskMaker, masks_of_plan
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import CARRY, NOT_A_NUMBER, Mask, Row, RowKind, StepPlan, StepResult
from mlx_tandem.engine.prefill import Chunk, Prefill
from mlx_tandem.engine.request_check import check_request
from mlx_tandem.engine.sequence import Sequence, sequences_of
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.kv.prefix import Match, PrefixCounts
from mlx_tandem.types import AdapterRef, Delta, Request, TokenLogprob

OVERTAKEN_FOR_SLOT = 32
"""Most requests that may overtake a request that waits for an adapter slot."""

_PRIORITY = attrgetter("priority")

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
        self.prefill = Prefill(config, limits, vocab_size, blocks.chunk)
        self.drafting = Drafting(blocks, vocab_size, config.max_num_seqs)
        self.mask_maker: MaskMaker | None = None  # the owner sets it before the first request
        # Both by priority, then first come first.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._choices: dict[int, dict[int, Sequence]] = {}  # by request id
        self._background: set[int] = set()  # requests made for training
        self._moving: dict[int, Sequence] = {}  # by id: running ones that wait to continue under another version
        self._seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._uploads: list[tuple[int, str]] = []  # for the next plan
        self._started: list[tuple[int, float]] = []  # for the next `take_events`
        self._preempted: list[int] = []
        self._next_id = self._num_masked = 0  # the latter counts open choices
        self.preemptions = 0
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
        is_masked = self.mask_maker is not None and self.mask_maker.constrains(request)
        choices = sequences_of(request, self._next_id, stop_ids, is_masked)
        self._next_id += request.n
        self._num_masked += is_masked and request.n
        self._sequences |= {s.id: s for s in choices}
        self._choices[request.id] = {s.choice: s for s in choices}
        if request.background:
            self._background.add(request.id)
        insort_right(self._waiting, choices[0], key=_PRIORITY)
        self._blocks.read_ahead(choices[0])
        self.prompt_tokens += len(request.prompt)

    def cancel(self, request: int, choice: int | None = None) -> None:
        """End a request or one choice of it; it has no more deltas. Unknown ids are ignored."""
        choices = self._choices.get(request, {})
        for s in list(choices.values()):
            if choice is None or s.choice == choice:
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
                self._moving[s.id] = s
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
    def num_running(self) -> int:
        """Number of sequences that have a seat."""
        return self.max_num_seqs - len(self._seats)

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for a seat."""
        return sum(1 + len(s.siblings) for s in self._waiting)

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
        events = self._started, self._preempted
        if self._started:
            self._started = []
        if self._preempted:
            self._preempted = []
        return events

    def plan(self, background: bool = True) -> StepPlan | None:
        """Return the next unit of device work, None when there is none now.

        Unless `background`, rows made for training are left out while users' requests are open.
        """
        left_out = set() if background or not self.has_users else self._background
        rows: list[Row] = []
        self._blocks.poll()
        for s in list(self._moving.values()):
            self._move(s)
        self._begin_waiting(left_out)
        loads = self._blocks.take_loads()
        for s in [s for s in self._wanted(left_out) if s.siblings and s.scheduled == s.prompt_length - 1]:
            self._fork(s)
        drafting = self.drafting
        wanted = self._wanted(left_out)
        drafting.begin(self._running, wanted)
        for s in wanted:
            # A row before this one may have taken the sequence's blocks, and then the sequence has lost its seat.
            if s.seat < 0 or not s.wants_decode or s.siblings or (s.pending and self._waits_for_token(s)):
                continue
            if not self._reserve(s, s.scheduled + 1, rows):
                continue
            newest = _CARRIED if s.pending else (s.tokens[-1],)
            drafts = () if drafting.proposes is None or (s.pending and s.is_masked) else drafting.drafts(s, rows)
            rows.append(self._row(s, _VERIFY if drafts else _DECODE, newest + drafts))
        self._plan_prefill(rows, left_out)
        saves = self._blocks.take_saves()
        if not (rows or loads or saves):
            return None
        new = [s for s in self._running if not s.is_seated]
        planned = {row.sequence for row in rows} if new else ()
        seatings = [s.take_seat() for s in new if s.id in planned]
        # The sequence of an upload may have ended: an adapter that nobody uses is not written, so it is not resident.
        uploads = [(slot, digest) for slot, digest in self._uploads if self._slots.references(digest)]
        for _, digest in set(self._uploads) - set(uploads):
            self._slots.lost(digest)
        constrained = enumerate(rows) if self._num_masked else ()
        masked = tuple([i for i, row in constrained if row.sample and self._sequences[row.sequence].is_masked])
        plan = StepPlan(tuple(rows), tuple(uploads), self._blocks.take_copies(), tuple(seatings), saves, loads, masked)
        self._uploads = []
        return plan

    def masks(self, plan: StepPlan, drawn: Mapping[int, tuple[int, ...]] = _NOTHING) -> list[list[Mask]]:
        """Return the masks for the newest plan, as `Runner.sample` takes them.

        drawn: by their sequence, the tokens that the plan before it has drawn, unless these have been taken in. Another
        thread may call this while nothing else is asked of the scheduler.
        """
        assert self.mask_maker is not None
        return masks_of_plan(self.mask_maker, plan, self._sequences, self.vocab_size, drawn)

    def _wanted(self, left_out: Collection[int]) -> list[Sequence]:
        """Return the running sequences whose requests are not left out and whose blocks are loaded."""
        wanted = [s for s in self._running if s.request.id not in left_out] if left_out else self._running
        return [s for s in wanted if not self._blocks.is_loading(s)] if self._blocks.has_loads else list(wanted)

    def _waits_for_token(self, s: Sequence) -> bool:
        """Return whether `s`, a token of which is on the device, has no row until the host knows that token."""
        return (s.slack > 0 and s.is_masked) or self.drafting.waits(s)

    def _plan_prefill(self, rows: list[Row], left_out: Collection[int]) -> None:
        """Add the chunks of prompts for this plan to its rows."""

        def take(s: Sequence, tokens: int, *, piggybacked: bool = False) -> Chunk | None:
            if s.seat < 0 or not self._reserve(s, s.scheduled + tokens, rows):
                return None
            chunk = tuple(s.tokens[s.scheduled : s.scheduled + tokens])
            rows.append(self._row(s, _PROMPT, chunk, piggybacked))
            return Chunk(padded_length(tokens) if rows[-1].targets else 0)

        reading = [s for s in self._wanted(left_out) if s.wants_prefill and s.seat >= 0]
        self.prefill.plan(reading, len(rows), take)

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
        request, tables, predicted = s.request, s.tables, False
        if kind is _VERIFY:
            s.pending += len(tokens) - 1
            s.slack += len(tokens) - 1
            tables = tuple([own + spare for own, spare in zip(tables, s.spare, strict=True)])
            predicted = self.drafting.are_predicted(s)
        version = s.adapter.version if request.follow and s.adapter is not None else 0
        background = request.background
        row = Row(
            kind, s.id, s.seat, s.slot, start, tokens, tables, sample, targets, version, background, piggybacked, slack
        )
        if request.pooling is None and not predicted:
            return row
        return structs.replace(row, pooling=request.pooling, predicted=predicted)

    def _start(self, s: Sequence) -> None:
        """Note that the first row of the request of `s` is planned."""
        self._blocks.count(s)
        for x in self._choices[s.request.id].values():
            x.cached = s.cached
        self._started.append((s.request.id, time.monotonic()))

    def _begin_waiting(self, left_out: Collection[int]) -> None:
        """Let waiting sequences run while there are seats, blocks for all of their tokens, and adapter slots.

        A sequence waits while another reads a prompt with the same beginning, or the drive returns more of its blocks.
        """
        blocked: list[Sequence] = []
        patience = OVERTAKEN_FOR_SLOT  # the least that is left among the blocked
        while self._waiting and patience > 0:
            s = self._waiting[0]
            if s.pending or len(blocked) > OVERTAKEN_FOR_SLOT or s.request.id in left_out:
                break
            group = [s, *s.siblings]
            waits = not self._may_have_slot(s)
            if not waits:
                match = self._find_room(s, group)
                if match is None:
                    break
                waits = self._blocks.leader(s, match) is not None or self._blocks.awaits(s, match)
            del self._waiting[0]
            if waits or not self._take_slot(group):
                blocked.append(s)
                patience = min(patience, OVERTAKEN_FOR_SLOT - s.overtaken)
                continue
            for b in blocked:
                b.overtaken += 1
            patience -= bool(blocked)
            self._blocks.begin(s)
            for x in group:
                x.seat = self._seats.pop()
            insort_right(self._running, s, key=_PRIORITY)
        self._waiting[:0] = blocked

    def _find_room(self, s: Sequence, group: list[Sequence]) -> Match | None:
        """Return the cached prefix of `s` if there are seats for `group` and blocks for the rest; else None."""
        while True:
            if len(group) <= len(self._seats):
                match = self._blocks.match(s)
                running = self._running
                short = self._blocks.short(s, match, len(running)) if running else None
                if not running or (short is None and self._has_tokens_for(s)):
                    return match
                if short is not None and not short.keeps_all and any(self._blocks.slide(x) for x in running):
                    continue
            if not self._displace_for(s):
                return None

    def _has_tokens_for(self, s: Sequence) -> bool:
        """Return whether `s` fits into `max_inflight_tokens` besides the running sequences."""
        most = self._config.max_inflight_tokens
        return not most or sum(x.most_tokens * (1 + len(x.siblings)) for x in (*self._running, s)) <= most

    def _displace_for(self, s: Sequence) -> bool:
        """Preempt the last sequence made for training in favour of a user's sequence; return whether there was one."""
        if s.request.background or not self._running or not self._running[-1].request.background:
            return False
        self._preempt(self._running[-1])
        return True

    def _may_have_slot(self, s: Sequence) -> bool:
        """Return whether `_take_slot` may succeed.

        It is asked in every plan before the prompt is looked up, which takes milliseconds for long prompts.
        """
        digest = s.adapter_digest
        if digest is None or self._slots.slot(digest) is not None or self._slots.available():
            return True
        return not s.request.background and self._users_slots() < self._slots.n

    def _take_slot(self, group: list[Sequence]) -> bool:
        """Give each of `group` its adapter's slot. Return False, and take nothing, when there is no slot."""
        first = group[0]
        if first.adapter_digest is None:
            for s in group:
                s.slot = 0
            return True
        assignment = self._slots.acquire(first.adapter_digest)
        if assignment is None and self._users_slots() < self._slots.n:
            while assignment is None and self._displace_for(first):
                assignment = self._slots.acquire(first.adapter_digest)
        if assignment is None:
            return False
        if assignment.upload:
            self._uploads.append((assignment.slot, first.adapter_digest))
        for s in group:
            s.slot = assignment.slot
            if s is not first:
                self._slots.acquire(first.adapter_digest)
        return True

    def _users_slots(self) -> int:
        """Return how many slots users' running sequences hold."""
        return len({s.adapter_digest for s in self._running if not s.request.background} - {None})

    def _move(self, s: Sequence) -> None:
        """Let `s` continue under the version that it follows, if that has a slot."""
        ref = s.next_adapter
        assert ref is not None and s.adapter is not None
        if ref.digest != s.adapter.digest:
            assignment = self._slots.acquire(ref.digest)
            if assignment is None:
                return
            if assignment.upload:
                self._uploads.append((assignment.slot, ref.digest))
            self._slots.release(s.adapter.digest)
            s.slot = assignment.slot
            self._blocks.mix(s)
        s.go_under(ref)
        del self._moving[s.id]

    def _fork(self, s: Sequence) -> None:
        """Let the siblings of `s` run: all of the prompt but its last token is computed and shared.

        Each then computes the last prompt token itself, which draws its own first token.
        """
        siblings, s.siblings = s.siblings, []
        at = self._running.index(s) + 1
        for f in siblings:
            if self._blocks.fork(s, f):
                self._running.insert(at, f)
                at += 1
            else:
                self._leave(f)
                insort_left(self._waiting, f, key=_PRIORITY)

    def _reserve(self, s: Sequence, positions: int, rows: list[Row]) -> bool:
        """Take blocks for `positions` of `s`; return False when `s` itself had to be preempted.

        If blocks are missing, sequences without a row in this plan give back blocks outside their windows, and then the
        last of them are preempted.
        """
        if positions <= s.room or self._blocks.reserve(s, positions):
            return True
        planned = {row.sequence for row in rows}
        for x in self._running:
            if x.id not in planned:
                self._blocks.slide(x)
        while not self._blocks.reserve(s, positions):
            victim = next(v for v in reversed(self._running) if v.id not in planned)
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _preempt(self, s: Sequence) -> None:
        """Let a running sequence give everything back and wait again."""
        self.preemptions += 1
        self._preempted.append(s.request.id)
        self._running.remove(s)
        for x in (s, *s.siblings):
            self._leave(x)
        # A sequence that was admitted and had no row yet comes after those that had one.
        insort_left(self._waiting, s, key=lambda x: (x.priority, x.cached is None))

    def _leave(self, s: Sequence) -> None:
        """Give back the blocks, the seat and the slot of a sequence, if it has any."""
        if s.seat < 0:
            return
        self._blocks.leave(s)
        self._seats.append(s.seat)
        if s.adapter_digest is not None:
            self._slots.release(s.adapter_digest)
        if s.next_adapter is not None:
            s.go_under(s.next_adapter)
            del self._moving[s.id]
        s.seat, s.slot, s.is_seated = -1, -1, False

    def _end(self, s: Sequence) -> None:
        """End a sequence, whether it waits or runs."""
        self._blocks.forget(s)
        if s.is_masked and self.mask_maker is not None:
            self._num_masked -= 1
            self.mask_maker.forget(s.request.id, s.choice)
        self.drafting.forget(s)
        choices = self._choices[s.request.id]
        del self._sequences[s.id], choices[s.choice]
        if not choices:
            del self._choices[s.request.id]
            self._background.discard(s.request.id)
        for leader in choices.values():
            if s in leader.siblings:
                leader.siblings.remove(s)
                self._leave(s)
                return
        place = bisect_left(self._waiting, s.priority, key=_PRIORITY)  # for the sibling that takes its place
        if s in self._running:
            self._running.remove(s)
        elif s in self._waiting:
            place = self._waiting.index(s)
            del self._waiting[place]
        self._leave(s)
        if s.siblings:  # nobody computes their prompt any more, so the next of them starts over
            heir, *others = s.siblings
            for f in s.siblings:
                self._leave(f)
            heir.siblings, heir.overtaken, heir.cached = others, s.overtaken, s.cached
            self._waiting.insert(place, heir)

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in the result of a step and return its outcome. Sequences that ended meanwhile are skipped."""
        outcome = StepOutcome()
        sequences, deltas, logprobs = self._sequences, outcome.deltas, result.logprobs
        spoiled: set[int] = set()
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
            if not is_finite:
                outcome.failed.append(s.request.id)
                for x in self._choices[s.request.id].values():
                    x.is_pure = False
                self.cancel(s.request.id)
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
            scores = () if s.scores is None else self._hand_out_scores(s)
            hidden = b"" if row.pooling is None else s.embedding
            predicted = predicted_of(row, result.tokens[i], drawn) if row.predicted else None
            cached = s.cached or 0
            deltas.append(
                Delta(s.request.id, s.choice, drawn, known, finish, scores, row.version, cached, hidden, predicted)
            )
            if finish:
                self._end(s)
        self.generated_tokens += sum([len(delta.tokens) for delta in deltas])
        if spoiled:
            self._blocks.spoil(spoiled)
        if plan.saves:
            self._blocks.saved(result.saves)
        self.drafting.observe(plan, result)
        return outcome

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
        sequences = [self._sequences.get(row.sequence) for plan in plans for row in plan.rows]
        failed = [] if again else list(dict.fromkeys(s.request.id for s in sequences if s is not None))
        for request in failed:
            self.cancel(request)
        for s in self._sequences.values():
            s.pending = s.slack = 0  # tokens that were drawn in these steps are drawn again
        for s in list(reversed(self._running)):
            self._preempt(s)
        # Nobody holds a slot now, and these uploads may not have been written, so their adapters are not resident.
        for _, digest in [u for plan in plans for u in plan.uploads] + self._uploads:
            self._slots.lost(digest)
        self._uploads = []
        return failed

    def check(self) -> None:
        """Assert the invariants; for tests, between steps."""
        self._blocks.check(self._sequences.values())
        held = [s.seat for s in self._sequences.values() if s.seat >= 0]
        assert sorted(held + self._seats) == list(range(self._config.max_num_seqs)), "a seat is lost or shared"
        siblings = [f for s in (*self._running, *self._waiting) for f in s.siblings]
        everyone = [*self._running, *self._waiting, *siblings]
        assert sorted(s.id for s in everyone) == sorted(self._sequences), "a sequence is lost or doubled"
        assert all(s.seat >= 0 for s in self._running)
        assert all(s.seat < 0 for s in self._waiting)
        assert all(s.seat >= 0 and s.next_adapter is not None for s in self._moving.values())
        assert self._moving.keys() == {s.id for s in self._sequences.values() if s.next_adapter is not None}
        assert self._background == {s.request.id for s in self._sequences.values() if s.request.background}
        for queue in (self._waiting, self._running):
            assert queue == sorted(queue, key=_PRIORITY), "the order of priorities is lost"
