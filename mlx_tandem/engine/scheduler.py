"""Decides what the device does next. Owns the sequences, their blocks, seats and adapter slots; touches no array.

A sequence waits, runs, and ends. Each plan gives every running sequence that can decode one row, and spends what a
time budget allows on chunks of the prompts that are being read. When the pool is full, the sequence that matters least
(the youngest of the largest priority value) gives its blocks back and is computed again later, its tokens kept
(preemption by recompute).

Rows made for training stand behind users' rows in everything, and a plan can leave them out; a request that waits has
their seats, blocks and slots at once. A request that follows its adapter goes on under a newer version with the keys
and values it has.

A plan may be made while the one before it is still on the device: tokens drawn there are `pending` until `settle`.

A sequence that needs a mask has a row only when all its tokens are known, and one with drafts in flight has no other
row until they are outcome. (docs/decisions/step-contract.md)
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort_left, insort_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.budget import UNLIMITED, StepLimits
from mlx_tandem.engine.cost import padded_length
from mlx_tandem.engine.masks import MaskMaker, masks_of_row
from mlx_tandem.engine.plan import CARRY, NOT_A_NUMBER, Mask, Row, RowKind, Seating, StepPlan, StepResult
from mlx_tandem.engine.prefill import Prefill
from mlx_tandem.engine.proposers import Proposer
from mlx_tandem.engine.request_check import check_request
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.engine.tier import Tier
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.kv.prefix import Match, PrefixCounts
from mlx_tandem.types import AdapterRef, Delta, FinishReason, Request, TokenLogprob

PATIENCE = 32
"""Requests that may overtake one that waits for an adapter slot."""

_PRIORITY = attrgetter("priority")

_CARRIED = (CARRY,)

_PROMPT, _DECODE, _VERIFY = RowKind  # names of the module are found faster than members of an enumeration


@dataclass(slots=True)
class StepOutcome:
    """What became known when a step was read: new tokens, and requests whose logits were not finite."""

    deltas: list[Delta] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)


class Scheduler:
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
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self.prefill = Prefill(config, limits, vocab_size)
        self.proposer: Proposer | None = None  # this and the next: set by the owner, before the first request
        self.mask_maker: MaskMaker | None = None
        # Both by priority, then first come first.
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._sequences: dict[int, Sequence] = {}
        self._choices: dict[int, dict[int, Sequence]] = {}  # by request id
        self._background: set[int] = set()  # requests made for training
        self._moving: dict[int, Sequence] = {}  # by id: running, and to go on under another version
        self._seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._uploads: list[tuple[int, str]] = []  # for the next plan
        self._started: list[tuple[int, float]] = []  # for the next `take_events`
        self._preempted: list[int] = []
        self._next_id = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest for one that could never run."""
        params = request.params
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        most = min(self._max_model_len, self._blocks.longest)
        check_request(request, stop_ids, vocab_size=self._vocab_size, most_tokens=most, most_choices=self.max_num_seqs)
        if request.adapter is not None and self._slots.n == 0:
            raise InvalidRequest("this server holds no adapters: max_loras is 0", param="model")
        if request.id in self._choices:
            raise InvalidRequest(f"request {request.id} exists", param="id")
        choices = [Sequence(self._next_id + i, request, i, stop_ids) for i in range(request.n)]
        self._next_id += request.n
        choices[0].siblings = choices[1:]
        is_masked = self.mask_maker is not None and self.mask_maker.constrains(request)
        for s in choices:
            s.is_masked = is_masked
        if params.prompt_logprobs is not None and len(request.prompt) > 1:
            scores: list[TokenLogprob] = []
            for s in choices:
                s.scores = scores
        self._sequences |= {s.id: s for s in choices}
        self._choices[request.id] = {s.choice: s for s in choices}
        if request.background:
            self._background.add(request.id)
        insort_right(self._waiting, choices[0], key=_PRIORITY)
        self._blocks.read_ahead(choices[0])
        self.prompt_tokens += len(request.prompt)

    def cancel(self, request: int, choice: int | None = None) -> None:
        """End a request or one choice of it; nothing more is said of it. Unknown ids are ignored."""
        choices = self._choices.get(request, {})
        for s in list(choices.values()):
            if choice is None or s.choice == choice:
                self._end(s)

    def follow(self, ref: AdapterRef) -> list[int]:
        """Requests that follow `ref.name` go on under it from their next row on, or once it has a slot; returns them.

        Those that wait begin under it; what they had computed before a preemption is computed under it, too.
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
        """What the sequences of a request run under now, or will."""
        refs = [r for s in self._choices.get(request, {}).values() for r in (s.adapter, s.next_adapter)]
        return {ref.digest for ref in refs if ref is not None}

    @property
    def has_users(self) -> bool:
        """Whether a request is open that was not made for training."""
        return len(self._choices) > len(self._background)

    @property
    def has_background(self) -> bool:
        return bool(self._background)

    @property
    def requests(self) -> Collection[int]:
        return self._choices.keys()

    @property
    def num_running(self) -> int:
        return self.max_num_seqs - len(self._seats)

    @property
    def num_waiting(self) -> int:
        return sum(1 + len(s.siblings) for s in self._waiting)

    @property
    def tier(self) -> Tier | None:
        return self._blocks.tier

    @property
    def prefix_counts(self) -> PrefixCounts:
        return self._blocks.prefix_counts

    @property
    def max_num_seqs(self) -> int:
        """Sequences that may run at once."""
        return self._config.max_num_seqs

    def take_events(self) -> tuple[list[tuple[int, float]], list[int]]:
        """Return what happened since the last call: requests whose first row was planned, each once and with the
        seconds of the monotonic clock then, and requests of which a sequence was preempted, once for each time.
        """
        events = self._started, self._preempted
        if self._started:
            self._started = []
        if self._preempted:
            self._preempted = []
        return events

    def plan(self, background: bool = True) -> StepPlan | None:
        """The next unit of device work, or None when there is none to do now. Unless `background`, rows made for
        training are left out while there are users' requests.
        """
        left_out = set() if background or not self.has_users else self._background
        rows: list[Row] = []
        self._blocks.poll()
        for s in list(self._moving.values()):
            self._move(s)
        self._admit(left_out)
        loads = self._blocks.take_loads()
        for s in [s for s in self._wanted(left_out) if s.siblings and s.scheduled == s.prompt_length - 1]:
            self._fork(s)
        proposer, may_wait = self.proposer, self.proposer is not None or self.mask_maker is not None
        for s in self._wanted(left_out):
            # A row before this one may have taken this sequence's blocks: then it has lost its seat.
            if s.seat < 0 or not s.wants_decode or s.siblings or (may_wait and self._waits_for_token(s)):
                continue
            if not self._reserve(s, s.scheduled + 1, rows):
                continue
            if s.pending:
                rows.append(self._row(s, _DECODE, _CARRIED))
            else:
                drafts = () if proposer is None else self._draft(s, proposer)
                rows.append(self._row(s, _VERIFY if drafts else _DECODE, (s.tokens[-1], *drafts)))
        self._plan_prefill(rows, left_out)
        saves = self._blocks.take_saves()
        if not (rows or loads or saves):
            return None
        new = [s for s in self._running if not s.is_seated]
        planned = {row.sequence for row in rows} if new else ()
        seatings = [self._seating(s) for s in new if s.id in planned]
        # Who asked for an upload may be gone again: what nobody uses is not written, so it is not resident.
        uploads = [(slot, digest) for slot, digest in self._uploads if self._slots.references(digest)]
        for _, digest in set(self._uploads) - set(uploads):
            self._slots.lost(digest)
        masked = () if self.mask_maker is None else self._masked(rows)
        plan = StepPlan(tuple(rows), tuple(uploads), self._blocks.take_copies(), tuple(seatings), saves, loads, masked)
        self._uploads = []
        return plan

    def _masked(self, rows: list[Row]) -> tuple[int, ...]:
        """Return the indices of the rows that draw by masks."""
        return tuple(i for i, row in enumerate(rows) if row.sample and self._sequences[row.sequence].is_masked)

    def masks(self, plan: StepPlan) -> list[list[Mask]]:
        """Return the masks for a plan that was launched just now, as `Runner.sample` takes them."""
        assert self.mask_maker is not None
        return [
            masks_of_row(self.mask_maker, self._sequences[plan.rows[i].sequence], plan.rows[i]) for i in plan.masked
        ]

    def _wanted(self, left_out: Collection[int]) -> list[Sequence]:
        """Those of the running whose requests are not left out, and whose blocks are there."""
        wanted = [s for s in self._running if s.request.id not in left_out] if left_out else self._running
        return [s for s in wanted if not self._blocks.is_loading(s)] if self._blocks.has_loads else list(wanted)

    def _waits_for_token(self, s: Sequence) -> bool:
        """Return whether `s` has no row until the host knows the token that is on the device."""
        by = self.proposer
        return s.pending > 0 and (s.is_masked or (by is not None and by.waits(s.request, s.choice)))

    def _draft(self, s: Sequence, proposer: Proposer) -> tuple[int, ...]:
        """Return proposed tokens to follow those of `s`: as many as may be said and as there are blocks for."""
        most = s.most_tokens - len(s.tokens) - 1
        proposed = proposer.propose(s.request, s.choice, s.tokens, most)[:most] if most else ()
        drafts = tuple(takewhile(lambda token: 0 <= token < self._vocab_size, proposed))
        return drafts[: self._blocks.draft(s, len(drafts), len(self._running))] if drafts else ()

    def _plan_prefill(self, rows: list[Row], left_out: Collection[int]) -> None:
        def take(s: Sequence, tokens: int, *, piggybacked: bool = False) -> int | None:
            # A row before this one may have taken this sequence's blocks.
            if s.seat < 0 or not self._reserve(s, s.scheduled + tokens, rows):
                return None
            chunk = tuple(s.tokens[s.scheduled : s.scheduled + tokens])
            rows.append(self._row(s, _PROMPT, chunk, piggybacked))
            return padded_length(tokens) if rows[-1].targets else 0

        reading = [s for s in self._wanted(left_out) if s.wants_prefill and s.seat >= 0]
        self.prefill.plan(reading, len(rows), take)

    def _row(self, s: Sequence, kind: RowKind, tokens: tuple[int, ...], piggybacked: bool = False) -> Row:
        start = s.scheduled
        if s.cached is None:
            self._start(s)
        s.scheduled += len(tokens)
        sample = kind is not _PROMPT or s.scheduled == s.total
        if sample:
            s.pending += 1
        targets = s.targets(start, s.scheduled) if s.scores is not None else ()
        request, tables = s.request, s.tables
        if kind is _VERIFY:
            tables = tuple([own + spare for own, spare in zip(tables, s.spare, strict=True)])
        version = s.adapter.version if request.follow and s.adapter is not None else 0
        background = request.background
        return Row(kind, s.id, s.seat, s.slot, start, tokens, tables, sample, targets, version, background, piggybacked)

    def _start(self, s: Sequence) -> None:
        """Note that the work on the request of `s` begins."""
        self._blocks.count(s)
        for x in self._choices[s.request.id].values():
            x.cached = s.cached
        self._started.append((s.request.id, time.monotonic()))

    def _seating(self, s: Sequence) -> Seating:
        s.is_seated = True
        return Seating(s.seat, s.request.params, s.choice, s.prompt_length, tuple(s.tokens), s.stop_ids)

    def _admit(self, left_out: Collection[int]) -> None:
        """Let waiting sequences run while there are seats, blocks for all they know, and adapter slots. One whose
        prompt begins as one that is being read waits for that, and for the drive where that has more of it.
        """
        blocked: list[Sequence] = []
        patience = PATIENCE  # of the one among the blocked that has the least left
        while self._waiting and patience > 0:
            s = self._waiting[0]
            if s.pending or len(blocked) > PATIENCE or s.request.id in left_out:
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
                patience = min(patience, PATIENCE - s.overtaken)
                continue
            for b in blocked:
                b.overtaken += 1
            patience -= bool(blocked)
            self._blocks.seat(s)
            for x in group:
                x.seat = self._seats.pop()
            insort_right(self._running, s, key=_PRIORITY)
        self._waiting[:0] = blocked

    def _find_room(self, s: Sequence, group: list[Sequence]) -> Match | None:
        """What is known of `s`, when there are seats for `group` and blocks for the rest."""
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
        most = self._config.max_inflight_tokens
        return not most or sum(x.most_tokens * (1 + len(x.siblings)) for x in (*self._running, s)) <= most

    def _displace_for(self, s: Sequence) -> bool:
        """A user's sequence takes the place of the least that was made for training; whether there was one."""
        if s.request.background or not self._running or not self._running[-1].request.background:
            return False
        self._preempt(self._running[-1])
        return True

    def _may_have_slot(self, s: Sequence) -> bool:
        """Whether `_take_slot` is worth a try. Asked before the prompt is looked up, which takes milliseconds for long
        ones, in every plan.
        """
        digest = s.adapter_digest
        if digest is None or self._slots.slot(digest) is not None or self._slots.available():
            return True
        return not s.request.background and self._users_slots() < self._slots.n

    def _take_slot(self, group: list[Sequence]) -> bool:
        """The adapter's slot for each of `group`; False, and nothing taken, when there is none for it."""
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
        """How many slots users' running sequences hold."""
        return len({s.adapter_digest for s in self._running if not s.request.background} - {None})

    def _move(self, s: Sequence) -> None:
        """On to the version that it follows, when that has a slot."""
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
        """The choices of a request part: all but the prompt's last token is computed and shared.

        Each then runs the last prompt token itself, which draws its own first token.
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
        """Blocks for `positions` of s; those that are not in this plan yet give back what they can do without, and then
        the last of them is preempted.
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
        self.preemptions += 1
        self._preempted.append(s.request.id)
        self._running.remove(s)
        for x in (s, *s.siblings):
            self._leave(x)
        # One that was admitted and had no row yet comes behind those that had.
        insort_left(self._waiting, s, key=lambda x: (x.priority, x.cached is None))

    def _leave(self, s: Sequence) -> None:
        """Give back what a running sequence holds."""
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
        """A sequence is over, whatever it was doing."""
        self._blocks.forget(s)
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
        place = bisect_left(self._waiting, s.priority, key=_PRIORITY)  # for an heir
        if s in self._running:
            self._running.remove(s)
        elif s in self._waiting:
            place = self._waiting.index(s)
            del self._waiting[place]
        self._leave(s)
        if s.siblings:  # nobody has computed their prompt now: the next of them starts over
            heir, *others = s.siblings
            for f in s.siblings:
                self._leave(f)
            heir.siblings, heir.overtaken, heir.cached = others, s.overtaken, s.cached
            self._waiting.insert(place, heir)

    def update_from_output(self, plan: StepPlan, result: StepResult) -> StepOutcome:
        """Take in what a step drew. Sequences that ended meanwhile are passed over."""
        outcome = StepOutcome()
        sequences, deltas, logprobs = self._sequences, outcome.deltas, result.logprobs
        spoiled: set[int] = set()
        for i, (row, drawn) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            is_finite = not drawn or drawn[-1] != NOT_A_NUMBER
            if not is_finite:
                spoiled.update(*row.tables)
            s = sequences.get(row.sequence)
            if row.targets and s is not None and s.scores is not None:
                # After a preemption, a chunk may begin with some that are known.
                s.scores += result.scores[i][len(s.scores) - row.start :]
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
            if row.kind is _VERIFY and s.seat >= 0:  # else it has given back what it had
                s.scheduled = row.start + len(drawn)
                self._blocks.truncate(s, row.start, s.scheduled)
            known = logprobs[i] if logprobs else None
            if len(drawn) == 1:
                s.tokens.append(drawn[0])
                finish = self._finish_reason(s, drawn[0])
            else:
                drawn, finish = self._say(s, drawn)
                known = known[: len(drawn)] if known else None
            if not s.has_drawn and s.seat >= 0:
                self._blocks.publish(s)
            scores = () if s.scores is None else self._hand_out_scores(s)
            deltas.append(Delta(s.request.id, s.choice, drawn, known, finish, scores, row.version, s.cached or 0))
            if finish:
                self._end(s)
        self.generated_tokens += sum([len(delta.tokens) for delta in deltas])
        if spoiled:
            self._blocks.spoil(spoiled)
        if plan.saves:
            self._blocks.saved(result.saves)
        return outcome

    def _say(self, s: Sequence, drawn: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Add drawn tokens to those of `s` up to the one that ends it; return these, and why it ends if it does."""
        for n, token in enumerate(drawn, 1):
            s.tokens.append(token)
            finish = self._finish_reason(s, token)
            if finish:
                return drawn[:n], finish
        return drawn, None

    def _hand_out_scores(self, s: Sequence) -> tuple[TokenLogprob, ...]:
        scores = tuple(s.scores or ())
        for x in self._choices[s.request.id].values():
            x.scores = None
        return scores

    def _finish_reason(self, s: Sequence, token: int) -> FinishReason | None:
        if token in s.stop_ids:
            return "stop"
        if len(s.tokens) >= s.most_tokens:
            return "length"
        return None

    def observe(self, plan: StepPlan, milliseconds: float) -> None:
        """Let the cost model learn from a step that took this long."""
        self.prefill.cost.observe_step(plan, milliseconds)

    def expected(self, plan: StepPlan) -> float:
        """Return the milliseconds that a step will take, by what such steps took; infinite where that is not known."""
        return self.prefill.cost.expected(plan)

    def fail(self, plans: Iterable[StepPlan], *, again: bool = False) -> list[int]:
        """Give up steps that were lost on the device, and return the requests that had a row in them: these end here,
        unless they can be computed `again`; then none is returned. Every other running sequence is computed again,
        since nothing in the cache can be trusted.
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
            s.pending = 0  # what was drawn in these steps is drawn again
        for s in list(reversed(self._running)):
            self._preempt(s)
        # Nobody holds a slot now, and what was to be written there may not have been: it is not resident.
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
