"""Planted bugs. Each changes the scheduler, its books or what the runner is told; the property suite must find it."""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs

from mlx_tandem.adapters.slots import Assignment, SlotTable
from mlx_tandem.engine import block_manager, drafting, masks, run_queue, scheduler
from mlx_tandem.engine import sequence as sequences
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.draft_blocks import DraftBlocks
from mlx_tandem.engine.drafting import Drafting
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import CARRY, Mask, Row, RowKind, StepPlan, StepResult
from mlx_tandem.engine.prefill import Prefill
from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.prefix_leaders import PrefixLeaders
from mlx_tandem.engine.run_queue import RunQueue
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.engine.snapshots import Snapshots
from mlx_tandem.kv import prefix
from mlx_tandem.kv.groups import room_of
from mlx_tandem.kv.groups.state import StateGroup
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.pool import SCRATCH, BlockPool
from mlx_tandem.kv.prefix import Match, PrefixCache
from mlx_tandem.types import AdapterRef, Delta
from tests.engine.reference import ReferenceRunner

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(slots=True)
class Corrupting:
    """A runner that executes another plan than it was given."""

    inner: ReferenceRunner
    change: Callable[[StepPlan], StepPlan]

    def launch(self, plan: StepPlan, on_built: Callable[[], None] | None = None) -> Any:
        return self.inner.launch(self.change(plan), on_built)

    @property
    def one_at_a_time(self) -> bool:
        return self.inner.one_at_a_time

    def place(self, masks: list[list[Mask]]) -> Any:
        return self.inner.place(masks)

    def sample(self, handle: Any, masks: Any) -> None:
        self.inner.sample(handle, masks)

    def drawn(self, handle: Any) -> list[tuple[int, ...]]:
        return self.inner.drawn(handle)

    def launch_waits(self, plan: StepPlan) -> bool:
        return self.inner.launch_waits(plan)

    def wait(self, handle: Any) -> StepResult:
        return self.inner.wait(handle)

    def reset(self) -> None:
        self.inner.reset()


def _rows(plan: StepPlan, change: Callable[[Row], Row]) -> StepPlan:
    return replace(plan, rows=tuple(change(r) for r in plan.rows))


def _keep_old_seats() -> Callable[[StepPlan], StepPlan]:
    taken: set[int] = set()

    def change(plan: StepPlan) -> StepPlan:
        kept = tuple(s for s in plan.seatings if s.seat not in taken)
        taken.update(s.seat for s in plan.seatings)
        return replace(plan, seatings=kept)

    return change


def _stale_carry() -> Callable[[StepPlan], StepPlan]:
    """The carried token is the one before the last."""
    return lambda plan: _rows(plan, lambda r: structs.replace(r, tokens=(0,)) if r.tokens == (CARRY,) else r)


def _last_block_of_neighbour(plan: StepPlan) -> StepPlan:
    if len(plan.rows) < 2:
        return plan
    tables = [r.tables[0] for r in plan.rows]
    return replace(
        plan,
        rows=tuple(
            structs.replace(r, tables=((*tables[i][:-1], tables[i - 1][-1]), *r.tables[1:])) if i == 1 else r
            for i, r in enumerate(plan.rows)
        ),
    )


CORRUPTIONS: dict[str, Callable[[], Callable[[StepPlan], StepPlan]]] = {
    "copies are skipped": lambda: lambda p: replace(p, copies=()),
    "uploads are skipped": lambda: lambda p: replace(p, uploads=()),
    "an upload goes to the next slot": lambda: (
        lambda p: replace(p, uploads=tuple((1 + slot % 3, d) for slot, d in p.uploads))
    ),
    "a seat is not reset": _keep_old_seats,
    "a seat forgets the output of before": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, history=s.history[: s.prompt_length]) for s in p.seatings))
    ),
    "all choices sample as the first": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, choice=0) for s in p.seatings))
    ),
    "a seat does not know what ends it": lambda: (
        lambda p: replace(p, seatings=tuple(replace(s, stop_ids=frozenset()) for s in p.seatings))
    ),
    "targets are skipped": lambda: lambda p: _rows(p, lambda r: structs.replace(r, targets=())),
    "targets are the tokens themselves": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, targets=r.tokens[: len(r.targets)]))
    ),
    "a stale token is carried": _stale_carry,
    "every decode carries": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, tokens=(CARRY,)) if r.kind is RowKind.DECODE else r)
    ),
    "rows start one too early": lambda: lambda p: _rows(p, lambda r: structs.replace(r, start=max(r.start - 1, 0))),
    "a row writes into its neighbour's block": lambda: _last_block_of_neighbour,
    "all rows run as the base": lambda: lambda p: _rows(p, lambda r: structs.replace(r, lora_slot=0)),
    "drafts are a chunk": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, kind=RowKind.PROMPT) if r.kind is RowKind.VERIFY else r)
    ),
    "a chunk is drafts": lambda: (
        lambda p: _rows(
            p,
            lambda r: (
                structs.replace(r, kind=RowKind.VERIFY)
                if r.kind is RowKind.PROMPT and r.sample and len(r.tokens) > 1
                else r
            ),
        )
    ),
    "drafts begin one too early": lambda: (
        lambda p: _rows(
            p,
            lambda r: structs.replace(r, tokens=r.tokens[1:]) if r.kind is RowKind.VERIFY and len(r.tokens) > 2 else r,
        )
    ),
    "the next row draws by the mask": lambda: (
        lambda p: replace(p, masked=tuple((i + 1) % len(p.rows) for i in p.masked))
    ),
    "no row draws by a mask": lambda: lambda p: replace(p, masked=()),
    "a row behind drafts begins where the host says": lambda: lambda p: _rows(p, lambda r: structs.replace(r, slack=0)),
    "a row behind drafts begins too far": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, start=r.start + 1) if r.slack else r)
    ),
    "a chunk loses its last token": lambda: (
        lambda p: _rows(p, lambda r: structs.replace(r, tokens=r.tokens[:-1]) if len(r.tokens) > 2 else r)
    ),
}


def _replace(s: Sequence, at: int, block: int) -> None:
    """Give a sequence another block of the first pool in this place."""
    s.tables = ((*s.table[:at], block, *s.table[at + 1 :]), *s.tables[1:])


def _keep_seated(patch: pytest.MonkeyPatch) -> None:
    def leave(self: RunQueue, s: Sequence) -> None:
        seated = s.is_seated
        original(self, s)
        s.is_seated = seated

    original = RunQueue._leave
    patch.setattr(RunQueue, "_leave", leave)


def _fork(share: bool, copy: bool, whole: bool = False) -> Plant:
    """A fork that counts no reader, or copies nothing, or lets the choices write into one last block."""

    def fork(self: BlockManager, s: Sequence, f: Sequence) -> bool:
        copies = dict(self.writes.copies)
        if not original(self, s, f):
            return False
        shared = [b for b in f.table if b in s.table]
        if not share:
            self.groups[0].pool.release(shared)
        if whole and len(f.table) > len(shared):
            self.groups[0].pool.release(f.table[-1:])
            _replace(f, len(f.table) - 1, s.table[len(f.table) - 1])
            self.groups[0].pool.share(f.table[-1:])
        if not copy:
            self.writes.copies = copies
        return True

    original = BlockManager.fork

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(BlockManager, "fork", fork)

    return plant


def _copy_a_copy(patch: pytest.MonkeyPatch) -> None:
    """A fork copies a block that the same plan is only about to fill."""

    def fork(self: BlockManager, s: Sequence, f: Sequence) -> bool:
        forked = original(self, s, f)
        for target in self.writes.copies:
            if target in f.table:
                self.writes.copies[target] = s.table[len(f.table) - 1]
        return forked

    original = BlockManager.fork
    patch.setattr(BlockManager, "fork", fork)


def _hit_everything(patch: pytest.MonkeyPatch) -> None:
    """A prompt that is there as a whole leaves nothing to compute."""

    def match(self: BlockManager, s: Sequence) -> Match:
        if not self._caches or s.scores is not None:
            return Match([[]], [0])
        return prefix.find(self._caches, self._keys.chain(s), s.tokens)

    patch.setattr(BlockManager, "match", match)


def _hit_scored(patch: pytest.MonkeyPatch) -> None:
    """A prompt whose logprobs are asked for is not computed where it is there."""
    patch.setattr(BlockManager, "match", lambda self, s: prefix.find(self._caches, self._keys.chain(s), s.tokens[:-1]))


def _publish_early(patch: pytest.MonkeyPatch) -> None:
    """What a step will have computed can be found as soon as it is planned."""

    def row(self: Scheduler, s: Sequence, *args: Any) -> Row:
        made = original(self, s, *args)
        known = s.tokens[: s.scheduled]
        if s.is_pure and self._blocks._caches:
            self._blocks._caches[0].publish(self._blocks._keys.chain(s), known, s.table)
        return made

    original = Scheduler._row
    patch.setattr(Scheduler, "_row", row)


def _share_by_name(patch: pytest.MonkeyPatch) -> None:
    """The name of an adapter stands for its content."""

    def chain(self: PrefixKeys, s: Sequence) -> Chain:
        if s.chain is None:
            s.chain = self._caches[0].chain(s.adapter.name if s.adapter else "")
        return s.chain

    patch.setattr(PrefixKeys, "chain", chain)


def _write_into_hits(patch: pytest.MonkeyPatch) -> None:
    """A block that agrees in part is shared as it is, and written to."""

    def begin(self: BlockManager, s: Sequence) -> None:
        match, copies = self.match(s), dict(self.writes.copies)
        original(self, s)
        if match.extra and self.writes.copies != copies:
            self.writes.copies = copies
            own, at = s.table[match.whole], match.whole
            self.groups[0].pool.share((match.sources[0],))
            self.groups[0].pool.release((own,))
            _replace(s, at, match.sources[0])

    original = BlockManager.begin
    patch.setattr(BlockManager, "begin", begin)


def _publish_the_impure(patch: pytest.MonkeyPatch) -> None:
    """What was computed under several versions, or is not finite, is there for others."""

    def publish(self: BlockManager, s: Sequence) -> None:
        s.is_pure = True
        original(self, s)

    original = BlockManager.publish
    patch.setattr(BlockManager, "publish", publish)


def _trust_after_failure(patch: pytest.MonkeyPatch) -> None:
    """What was in the cache before a failed step can still be found."""
    patch.setattr(BlockManager, "distrust", lambda self: self.writes.distrust())


def _evict_in_silence(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given to others and can still be found."""
    patch.setattr(PrefixCache, "_on_evict", lambda self, block: None)
    patch.setattr(PrefixCache, "check", lambda self: None)


def _wait_for_the_gone(patch: pytest.MonkeyPatch) -> None:
    """Who has left is still waited for."""
    patch.setattr(PrefixLeaders, "retract", lambda self, s: None)
    patch.setattr(BlockManager, "check", lambda self, sequences: None)


def _early_release(patch: pytest.MonkeyPatch) -> None:
    """A sequence whose last token is being drawn gives its last block back before that."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        for s in self.queue.running:
            if made and s.is_complete and s.table:
                self._blocks.groups[0].pool.release(s.table[-1:])
                s.tables = (s.table[:-1], *s.tables[1:])
        return made

    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", plan)


def _speak_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    """Tokens of sequences that ended meanwhile are passed on."""

    def add(self: Scheduler, request: Any) -> None:
        original_add(self, request)
        owners.update({s.id: (request.id, s.choice) for s in self._choices[request.id].values()})

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        gone = [
            Delta(*owners[row.sequence], drawn)
            for row, drawn in zip(plan.rows, result.tokens, strict=True)
            if drawn and row.sequence not in self._sequences
        ]
        outcome = original_update(self, plan, result)
        outcome.deltas += gone
        return outcome

    owners: dict[int, tuple[int, int]] = {}
    original_add, original_update = Scheduler.add, Scheduler.update_from_output
    patch.setattr(Scheduler, "add", add)
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _never_mind_pending(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence comes back although a token of it is still on the device."""

    def preempt(self: RunQueue, s: Sequence) -> None:
        original(self, s)
        s.pending = 0

    original = RunQueue.preempt
    patch.setattr(RunQueue, "preempt", preempt)


def _lose_heirs(patch: pytest.MonkeyPatch) -> None:
    """The end of a leader takes the choices with it that wait for its prompt."""

    def end(self: Scheduler, s: Sequence) -> None:
        for f in s.siblings:
            self.queue._leave(f)
        s.siblings = []
        original(self, s)

    original = Scheduler._end
    patch.setattr(Scheduler, "_end", end)


def _preempt_oldest(patch: pytest.MonkeyPatch) -> None:
    """Blocks are taken from the oldest sequence, whose row may be in the plan already."""

    def reserve(self: RunQueue, s: Sequence, positions: int, rows: list[Row]) -> bool:
        while not self._blocks.reserve(s, positions):
            victim = self.running[0]
            self.preempt(victim)
            if victim is s:
                return False
        return True

    patch.setattr(RunQueue, "reserve", reserve)


def _forget_nothing(patch: pytest.MonkeyPatch) -> None:
    """After a failed step everything that was not in it goes on as if nothing had happened."""

    def fail(self: Scheduler, plans: Any, again: bool = False) -> list[int]:
        sequences = [self._sequences.get(row.sequence) for plan in plans for row in plan.rows]
        failed = list(dict.fromkeys(s.request.id for s in sequences if s is not None))
        for request in failed:
            self.cancel(request)
        return failed

    patch.setattr(Scheduler, "fail", fail)


def _wait_for_lost_tokens(patch: pytest.MonkeyPatch) -> None:
    """Tokens of a step that is computed again are still waited for."""
    right = Scheduler.fail

    def fail(self: Scheduler, plans: Any, *, again: bool = False) -> list[int]:
        pending = {s: s.pending for s in self._sequences.values()}
        failed = right(self, plans, again=again)
        for s in self._sequences.values():
            s.pending = pending[s]
        return failed

    patch.setattr(Scheduler, "fail", fail)


def _trust_lost_uploads(patch: pytest.MonkeyPatch) -> None:
    """Adapters whose upload was lost with a step count as resident."""
    patch.setattr(SlotTable, "lost", lambda self, digest: None)


def _assume_resident(patch: pytest.MonkeyPatch) -> None:
    """A slot is given to another adapter without its content being written."""

    def acquire(self: SlotTable, digest: str) -> Assignment | None:
        made = original(self, digest)
        return replace(made, upload=False) if made and made.evicted else made

    original = SlotTable.acquire
    patch.setattr(SlotTable, "acquire", acquire)


def _steal_slots(patch: pytest.MonkeyPatch) -> None:
    """A slot in use is given to another adapter."""

    def acquire(self: SlotTable, digest: str) -> Assignment | None:
        made = original(self, digest)
        return made or Assignment(1, upload=True)

    original = SlotTable.acquire
    patch.setattr(SlotTable, "acquire", acquire)
    patch.setattr(SlotTable, "release", lambda self, digest: None)


def _attribute(target: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(target, name, value)


def _release_twice_shared(patch: pytest.MonkeyPatch) -> None:
    """Blocks with two readers are free when the first leaves."""

    def release(self: BlockPool, blocks: Any) -> None:
        blocks = list(blocks)
        original(self, blocks)
        for b in blocks:
            if self.count[b] == 1 and self.free_blocks < 3:
                self._free[b] = True
                self._stack.append(b)
                self.free_blocks += 1

    original = BlockPool.release
    patch.setattr(BlockPool, "release", release)


def _never_stop(patch: pytest.MonkeyPatch) -> None:
    def init(self: Sequence, *args: Any) -> None:
        original(self, *args)
        self.stop_ids = frozenset()

    original = Sequence.__init__
    patch.setattr(Sequence, "__init__", init)


def _one_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "is_complete", property(lambda s: s.generated > s.request.params.max_tokens))
    patch.setattr(
        Sequence,
        "finish_reason",
        lambda s, token: (
            "stop"
            if token in s.stop_ids
            else "length"
            if len(s.tokens) - s.prompt_length > s.request.params.max_tokens
            else None
        ),
    )
    patch.setattr(
        Sequence,
        "wants_decode",
        property(lambda s: s.scheduled == s.total - 1 and s.generated <= s.request.params.max_tokens),
    )


def _nan_is_a_token(patch: pytest.MonkeyPatch) -> None:
    """A row that is not finite draws token 0."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        return original(self, plan, replace(result, tokens=[tuple(max(t, 0) for t in own) for own in result.tokens]))

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _leave_unclean(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a row that was not finite go to their next owner as they are."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        outcome = original(self, plan, result)
        self._blocks.writes.distrust()
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _first_come_first_served(patch: pytest.MonkeyPatch) -> None:
    """What a request says of its priority is not heard; nor is the check that would notice."""
    patch.setattr(run_queue, "_PRIORITY", lambda s: (False, 0))


def _lose_the_place(patch: pytest.MonkeyPatch) -> None:
    """Whoever was preempted waits behind its equals."""

    def preempt(self: RunQueue, s: Sequence) -> None:
        original(self, s)
        self.waiting.remove(s)
        insort_right(self.waiting, s, key=lambda x: x.priority)

    original = RunQueue.preempt
    patch.setattr(RunQueue, "preempt", preempt)


def _score_twice(patch: pytest.MonkeyPatch) -> None:
    """After a preemption what is known of the prompt is taken in again."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        for row in plan.rows:
            s = self._sequences.get(row.sequence)
            if row.targets and s is not None and s.scores is not None:
                s.scores += s.scores[row.start :]
        return original(self, plan, result)

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _hand_out_again(patch: pytest.MonkeyPatch) -> None:
    """Each choice hands out the prompt's logprobs."""
    patch.setattr(Scheduler, "_hand_out_scores", lambda self, s: tuple(s.scores))


def _read_everything(patch: pytest.MonkeyPatch) -> None:
    def plan(self: Prefill, *args: Any) -> None:
        config, self._config = self._config, structs.replace(self._config, prefill_batch_size=0)
        original(self, *args)
        self._config = config

    original = Prefill.plan
    patch.setattr(Prefill, "plan", plan)


def _follow_in_name_only(patch: pytest.MonkeyPatch) -> None:
    """A follower says the new version and stays in the old one's slot."""

    def move(self: RunQueue, s: Sequence) -> None:
        slot = s.slot
        original(self, s)
        s.slot = slot

    original = RunQueue._move
    patch.setattr(RunQueue, "_move", move)


def _name_the_newest(patch: pytest.MonkeyPatch) -> None:
    """Tokens name the version that their sequence has by the time they are read."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        newest = {s.id: s.adapter.version for s in self._sequences.values() if s.request.follow and s.adapter}
        rows = tuple(structs.replace(row, version=newest.get(row.sequence, 0)) for row in plan.rows)
        return original(self, replace(plan, rows=rows), result)

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _follow_without_being_asked(patch: pytest.MonkeyPatch) -> None:
    """Pinned requests go on under newer versions, too."""

    def follows(self: Sequence, ref: AdapterRef) -> bool:
        adapter = self.next_adapter or self.adapter
        return adapter is not None and adapter.name == ref.name and adapter != ref

    patch.setattr(Sequence, "follows", follows)


def _leave_nobody_out(patch: pytest.MonkeyPatch) -> None:
    """Rows made for training run whenever they can."""
    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", lambda self, background=True: original(self, True))


def _drawn(change: Callable[[Row, tuple[int, ...]], tuple[int, ...]]) -> Plant:
    """What rows with drafts have drawn is taken for something else."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        tokens = [
            change(row, drawn) if row.kind is RowKind.VERIFY and drawn[-1] >= 0 else drawn
            for row, drawn in zip(plan.rows, result.tokens, strict=True)
        ]
        return original(self, plan, replace(result, tokens=tokens))

    original = Scheduler.update_from_output
    return lambda patch: patch.setattr(Scheduler, "update_from_output", update_from_output)


def _truncate(positions: int) -> Plant:
    """So many positions more than were accepted are kept."""
    original = DraftBlocks.truncate
    changed = lambda self, s, n: original(self, s, n + positions)  # noqa: E731
    return _attribute(DraftBlocks, "truncate", changed)


def _shorten_without_release(patch: pytest.MonkeyPatch) -> None:
    """The blocks of rejected drafts leave the table and are nobody's."""

    def truncate(self: DraftBlocks, s: Sequence, positions: int) -> None:
        s.tables = tuple(table[: -(-positions // self._groups[0].pool.block_size)] for table in s.tables)
        s.room = room_of(self._groups, s.tables)

    patch.setattr(DraftBlocks, "truncate", truncate)


def _stay_behind_drafts(patch: pytest.MonkeyPatch) -> None:
    """What was scheduled of drafts that were rejected counts as computed."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        ends = {row.sequence: row.start + len(row.tokens) for row in plan.rows if row.kind is RowKind.VERIFY}
        outcome = original(self, plan, result)
        for sequence, end in ends.items():
            s = self._sequences.get(sequence)
            if s is not None and s.seat >= 0:
                s.scheduled = end
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _roll_nothing_back(patch: pytest.MonkeyPatch) -> None:
    """Whoever lost its seat while its drafts were on the device is rolled back in its new one."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        verified = [self._sequences.get(row.sequence) for row in plan.rows if row.kind is RowKind.VERIFY]
        waiting = [s for s in verified if s is not None and s.seat < 0]
        seats = {s: s.seat for s in waiting}
        for s in waiting:
            s.seat = 0
        outcome = original(self, plan, result)
        for s in waiting:
            s.seat = seats[s]
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _say_everything(patch: pytest.MonkeyPatch) -> None:
    """All that was drawn is said, also behind the token that ends its choice."""

    def say(self: Sequence, drawn: tuple[int, ...]) -> Any:
        return drawn, original(self, drawn)[1]

    original = Sequence.say
    patch.setattr(Sequence, "say", say)


def _look_at_the_last(patch: pytest.MonkeyPatch) -> None:
    """Of several tokens only the last can end a choice."""

    def say(self: Sequence, drawn: tuple[int, ...]) -> Any:
        self.tokens += drawn
        return drawn, self.finish_reason(drawn[-1])

    patch.setattr(Sequence, "say", say)


def _find_cached_prompts_of_embeddings(patch: pytest.MonkeyPatch) -> None:
    """The hidden states of what is in the prefix cache are missing."""
    patch.setattr(Sequence, "reads_whole_prompt", property(lambda s: s.scores is not None))


def _add_to_what_was_pooled_before(patch: pytest.MonkeyPatch) -> None:
    """A sequence that begins again keeps the sum of its first time."""

    def pool(s: Sequence, start: int, hidden: list[float]) -> None:
        original(s, start if start or not s.pooled else 1, hidden)

    original = Sequence.pool
    patch.setattr(Sequence, "pool", pool)


def _index_drafts(patch: pytest.MonkeyPatch) -> None:
    """Drafts can be found by others before they are accepted."""

    def row(self: Scheduler, s: Sequence, kind: RowKind, tokens: Any, *args: Any) -> Row:
        made = original(self, s, kind, tokens, *args)
        if kind is RowKind.VERIFY and s.is_pure and self._blocks._caches:
            known = [*s.tokens, *tokens[1:]]
            chain = self._blocks._keys.chain(s).fork()
            s.published = self._blocks._caches[0].publish(chain, known, s.table, s.published)
        return made

    original = Scheduler._row
    patch.setattr(Scheduler, "_row", row)


def _draft_beyond(patch: pytest.MonkeyPatch) -> None:
    """Drafts may reach behind the last token that a choice may have."""

    def drafts(self: Drafting, s: Sequence, rows: list[Row]) -> tuple[int, ...]:
        s.most_tokens += 3
        drafts = original(self, s, rows)
        s.most_tokens -= 3
        return drafts

    original = Drafting.drafts
    patch.setattr(Drafting, "drafts", drafts)


def _trust_proposers(patch: pytest.MonkeyPatch) -> None:
    """A draft that is no token goes to the device."""
    patch.setattr(drafting, "takewhile", lambda condition, tokens: tokens)


def _draft_without_blocks(patch: pytest.MonkeyPatch) -> None:
    """Drafts are sent for which there are no blocks."""
    patch.setattr(DraftBlocks, "take", lambda self, s, drafts, running: drafts)


def _forget_the_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Settled drafts leave a sequence where it was before the row that follows them."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        verified = [(r, d) for r, d in zip(plan.rows, result.tokens, strict=True) if r.kind is RowKind.VERIFY]
        outcome = original(self, plan, result)
        for row, drawn in verified:
            s = self._sequences.get(row.sequence)
            if s is not None and s.seat >= 0 and s.pending:
                s.scheduled = row.start + len(drawn)
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _shorten_under_the_row_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Settled drafts give back the blocks of the row that follows them."""

    def truncate(self: DraftBlocks, s: Sequence, positions: int) -> None:
        original(self, s, positions - s.slack)

    original = DraftBlocks.truncate
    patch.setattr(DraftBlocks, "truncate", truncate)


def _settle_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Drafts that were read count as drafts on the device."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        before = {s.id: s.slack for s in self._sequences.values()}
        outcome = original(self, plan, result)
        for s in self._sequences.values():
            s.slack = before[s.id]
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _draft_as_if_read(patch: pytest.MonkeyPatch) -> None:
    """Tokens on the device do not count among those that a choice may have when it drafts."""

    def drafts(self: Drafting, s: Sequence, rows: list[Row]) -> tuple[int, ...]:
        s.most_tokens += s.pending
        drafts = original(self, s, rows)
        s.most_tokens -= s.pending
        return drafts

    original = Drafting.drafts
    patch.setattr(Drafting, "drafts", drafts)


def _count_deltas(patch: pytest.MonkeyPatch) -> None:
    """What is counted as generated are rows, not tokens."""

    def update_from_output(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutcome:
        before = self.generated_tokens
        outcome = original(self, plan, result)
        self.generated_tokens = before + len(outcome.deltas)
        return outcome

    original = Scheduler.update_from_output
    patch.setattr(Scheduler, "update_from_output", update_from_output)


def _masks(change: Callable[[list[Any]], list[Any]]) -> Plant:
    """Rows draw by other masks than were made for them."""
    original = Scheduler.masks
    return _attribute(Scheduler, "masks", lambda self, *args: change(original(self, *args)))


def _mask_before_the_token_is_known(patch: pytest.MonkeyPatch) -> None:
    """Masks are made when the plan is, although the tokens before them may be on the device."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        if made is not None:
            early[id(self)] = masks_of(self, made)
        return made

    early: dict[int, list[list[Mask]]] = {}
    original, masks_of = Scheduler.plan, Scheduler.masks
    patch.setattr(Scheduler, "plan", plan)
    patch.setattr(Scheduler, "masks", lambda self, plan, *args: early[id(self)])


def _never_forget(patch: pytest.MonkeyPatch) -> None:
    """The maker of masks is not told that a choice has ended."""

    def end(self: Scheduler, s: Sequence) -> None:
        s.is_masked = False
        original(self, s)

    original = Scheduler._end
    patch.setattr(Scheduler, "_end", end)


def _mask_the_token_before(patch: pytest.MonkeyPatch) -> None:
    """Masks are made without the newest token."""
    original = masks.Place
    patch.setattr(masks, "Place", lambda request, choice, tokens: original(request, choice, tokens[:-1]))


_masks_of = Scheduler.masks


def _mask_behind_the_end(patch: pytest.MonkeyPatch) -> None:
    """The maker of masks is asked what follows tokens that end their choice."""

    def masks_of_plan(maker: Any, plan: StepPlan, sequences: Any, size: int, drawn: Any) -> list[list[Mask]]:
        ends = {id: s.stop_ids for id, s in sequences.items()}
        for s in sequences.values():
            s.stop_ids = frozenset()
        try:
            return original(maker, plan, sequences, size, drawn)
        finally:
            for id, s in sequences.items():
                s.stop_ids = ends[id]

    original = masks.masks_of_plan
    patch.setattr(scheduler, "masks_of_plan", masks_of_plan)


def _mask_drafts_alike(patch: pytest.MonkeyPatch) -> None:
    """All positions of a row draw by the mask of its first."""
    patch.setattr(masks, "allows", lambda mask, token: False)


def _mask_some_choices(patch: pytest.MonkeyPatch) -> None:
    """Only the first choice of a request draws by masks."""

    def plan(self: Scheduler, *args: Any) -> StepPlan | None:
        made = original(self, *args)
        if made is None:
            return None
        firsts = [i for i in made.masked if self._sequences[made.rows[i].sequence].choice == 0]
        return replace(made, masked=tuple(firsts))

    original = Scheduler.plan
    patch.setattr(Scheduler, "plan", plan)


def _share_live_states(patch: pytest.MonkeyPatch) -> None:
    """Choices that part within a block go on in one row of state."""

    def copy(self: StateGroup, table: Any, positions: int) -> Any:
        self.pool.share(b for b in table if b != SCRATCH)
        return table, None

    patch.setattr(StateGroup, "copy", copy)


def _ask_each_group_once(patch: pytest.MonkeyPatch) -> None:
    """A group's longest beginning is cut to what another knows, as if every shorter one were known, too."""

    def find(caches: Any, chain: Chain, tokens: Any) -> Match:
        tables = []
        most = len(tokens) // caches[0].block_size
        for cache in caches:
            tables.append(cache.whole(chain, tokens, most))
            most = len(tables[-1])
        return Match([table[:most] for table in tables], [SCRATCH for _ in caches])

    patch.setattr(block_manager, "find", find)


def _wait_behind_training(patch: pytest.MonkeyPatch) -> None:
    """Who asks makes no difference to the order."""
    patch.setattr(Sequence, "priority", property(lambda s: (False, s.request.priority)))


def _with_activation(position: Callable[[int, int], int]) -> Plant:
    """The keys of blocks are those of an adapter that applies from another position: of this, and the block's size."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def chain(self: PrefixCache, adapter: str, adapter_start: int = 0) -> Chain:
            return original(self, adapter, position(adapter_start, self.block_size))

        original = PrefixCache.chain
        patch.setattr(PrefixCache, "chain", chain)

    return plant


def _read_across_activations(patch: pytest.MonkeyPatch) -> None:
    """A chunk goes on where its adapter begins to apply."""

    def chunk(self: Scheduler, s: Sequence, tokens: int) -> int:
        adapter_start, s.adapter_start = s.adapter_start, 0
        tokens = original(self, s, tokens)
        s.adapter_start = adapter_start
        return tokens

    original = Scheduler._chunk
    patch.setattr(Scheduler, "_chunk", chunk)


def _activate_at_first(patch: pytest.MonkeyPatch) -> None:
    """An adapter applies from where it is invoked for the first time."""

    def adapter_start_of(adapter: AdapterRef | None, prompt: tuple[int, ...]) -> int:
        wanted = () if adapter is None else adapter.invocation
        places = (at for at in range(len(prompt)) if prompt[at : at + len(wanted)] == wanted)
        return next(places, sequences.NEVER) if wanted else 0

    patch.setattr(sequences, "adapter_start_of", adapter_start_of)


PLANTS: dict[str, Plant] = {
    "preemption keeps the seat's state": _keep_seated,
    "a fork counts no readers": _fork(share=False, copy=True),
    "a fork copies nothing": _fork(share=True, copy=False),
    "a fork shares the block that is written": _fork(share=True, copy=False, whole=True),
    "a fork copies what is not there yet": _copy_a_copy,
    "a whole prompt is a hit": _hit_everything,
    "a scored prompt is a hit": _hit_scored,
    "blocks are published before their step is read": _publish_early,
    "the name of an adapter is its namespace": _share_by_name,
    "the block in which an adapter begins is the base's": _with_activation(lambda at, size: -(-at // size) * size),
    "what an adapter computes is the base's": _with_activation(lambda at, size: sequences.NEVER if at else 0),
    "a row goes on where its adapter begins": _read_across_activations,
    "an adapter begins where it is invoked first": _activate_at_first,
    "a hit is written to": _write_into_hits,
    "a hit is longer than it agrees": _attribute(prefix, "_shared", lambda a, b: min(len(a), len(b))),
    "what is not of one version can be found": _publish_the_impure,
    "what a failed step leaves can be found": _trust_after_failure,
    "what is given to others can be found": _evict_in_silence,
    "whoever has left is waited for": _wait_for_the_gone,
    "blocks are released early": _early_release,
    "shared blocks are released early": _release_twice_shared,
    "an outcome speaks of what has ended": _speak_of_the_dead,
    "an outcome forgets what was pending": _never_mind_pending,
    "a cancelled leader takes its siblings along": _lose_heirs,
    "a planned sequence is preempted": _preempt_oldest,
    "survivors of a failed step keep their cache": _forget_nothing,
    "tokens of a lost step are waited for": _wait_for_lost_tokens,
    "an upload that was lost is trusted": _trust_lost_uploads,
    "an evicted slot is not written": _assume_resident,
    "a slot in use is given away": _steal_slots,
    "a slot is never given back": _attribute(SlotTable, "release", lambda self, digest: None),
    "stop ids are ignored": _never_stop,
    "one token too many": _one_too_many,
    "not a number is a token": _nan_is_a_token,
    "what is not finite is left in the blocks": _leave_unclean,
    "a priority is not heard": _first_come_first_served,
    "whoever was preempted waits at the end": _lose_the_place,
    "what is known of a prompt is taken in twice": _score_twice,
    "a prompt's logprobs are handed out twice": _hand_out_again,
    "any number of prompts is read at once": _read_everything,
    "any number of tokens is in flight": _attribute(RunQueue, "_has_tokens_for", lambda self, s: True),
    "a follower stays in its slot": _follow_in_name_only,
    "a token names the newest version": _name_the_newest,
    "everybody follows": _follow_without_being_asked,
    "rows made for training are never left out": _leave_nobody_out,
    "users wait behind training": _wait_behind_training,
    "all drafts are accepted": _drawn(lambda row, drawn: (*row.tokens[1:], drawn[-1])),
    "no draft is accepted": _drawn(lambda row, drawn: drawn[-1:]),
    "a draft that was accepted is said twice": _drawn(lambda row, drawn: (*drawn[:1], *drawn)),
    "the last token is a draft": _drawn(lambda row, drawn: (*drawn[:-1], row.tokens[-1])),
    "a position that was accepted is given back": _truncate(-1),
    "blocks of rejected drafts are kept": _shorten_without_release,
    "rejected drafts count as computed": _stay_behind_drafts,
    "whoever has no seat is rolled back": _roll_nothing_back,
    "what is behind the end is said": _say_everything,
    "an end among accepted drafts is not seen": _look_at_the_last,
    "embeddings begin behind what is cached": _find_cached_prompts_of_embeddings,
    "embeddings keep the sum of a preempted run": _add_to_what_was_pooled_before,
    "drafts can be found": _index_drafts,
    "drafts reach too far": _draft_beyond,
    "a draft is no token": _trust_proposers,
    "drafts have no blocks": _draft_without_blocks,
    "settled drafts forget the row behind them": _forget_the_row_in_flight,
    "settled drafts take the blocks of the row behind them": _shorten_under_the_row_in_flight,
    "drafts are never settled": _settle_for_ever,
    "drafts behind the device's are one too many": _draft_as_if_read,
    "rows are counted as tokens": _count_deltas,
    "masks are those of other rows": _masks(lambda made: made[::-1]),
    "masks are turned around": _masks(lambda made: [own[::-1] for own in made]),
    "everything may be drawn": _masks(lambda made: [[b"\xff" * 4] * len(own) for own in made]),
    "a mask does not wait for the token before it": _mask_before_the_token_is_known,
    "a mask made early lacks the tokens that are not taken in": _attribute(
        Scheduler, "masks", lambda self, plan, drawn=None: _masks_of(self, plan)
    ),
    "a mask made early is asked for behind the end": _mask_behind_the_end,
    "the maker of masks keeps what has ended": _never_forget,
    "a mask is one token old": _mask_the_token_before,
    "drafts draw by one mask": _mask_drafts_alike,
    "other choices draw without masks": _mask_some_choices,
    "a state is not copied": _share_live_states,
    "a chunk goes beyond the block that it begins within": _attribute(
        Snapshots, "chunk", lambda self, s, tokens: tokens
    ),
    "drafts that cross a block have no row of state": _attribute(
        StateGroup, "take_drafts", lambda self, table, start, drafts: table
    ),
    "drafts that cross several blocks have one row of state": _attribute(
        StateGroup, "take_drafts", lambda self, table, start, drafts: self.take(table, start + 1 + drafts)
    ),
    "a beginning of a state's block is a hit": _attribute(StateGroup, "divides", True),
    "the state before the next position is given back": _attribute(
        StateGroup, "first_needed", lambda self, position: position // self.pool.block_size
    ),
    "each group is asked once what it knows": _ask_each_group_once,
    "whoever waits for a slot waits for ever": _attribute(run_queue, "OVERTAKEN_FOR_SLOT", 1000),
}

OF_SPOILS = {"blocks are published before their step is read"}
"""Those that show where rows are often not finite."""

OF_STATES = {
    "a chunk goes beyond the block that it begins within",
    "a state is not copied",
    "each group is asked once what it knows",
}
"""Plants that only show where layers keep a state."""

FOUND_BY = {
    "embeddings keep the sum of a preempted run": 409,
    "whoever waits for a slot waits for ever": 300,
    "settled drafts take the blocks of the row behind them": 172,
    "a draft is no token": 115,
    "any number of prompts is read at once": 113,
    "each group is asked once what it knows": 106,
    "what is known of a prompt is taken in twice": 100,
    "blocks are published before their step is read": 90,
    "an upload that was lost is trusted": 84,
    "a hit is written to": 64,
    "a fork copies what is not there yet": 46,
    "an end among accepted drafts is not seen": 44,
    "what is behind the end is said": 44,
    "a cancelled leader takes its siblings along": 39,
    "a token names the newest version": 37,
    "whoever has no seat is rolled back": 31,
    "the block in which an adapter begins is the base's": 27,
    "what an adapter computes is the base's": 27,
    "a row goes on where its adapter begins": 27,
    "an adapter begins where it is invoked first": 27,
    "rows made for training are never left out": 23,
    "masks are turned around": 21,
    "a mask made early is asked for behind the end": 21,
    "drafts draw by one mask": 21,
    "settled drafts forget the row behind them": 17,
    "what is not finite is left in the blocks": 13,
}
"""The first workload that found a plant when that was last looked up, for plants that few find. It is tried before the
others: one that finds it no longer costs time and nothing else."""
