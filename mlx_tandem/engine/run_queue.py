"""The queue of sequences: who runs, and who waits for a seat, blocks and an adapter slot.

A waiting sequence begins when there are seats for all of its choices, blocks for all of its tokens, and a slot for its
adapter. A running sequence that has to go gives everything back and waits again (preemption by recompute). Sequences
made for training are the first to go, and a user's sequence may displace them to begin. So may the first sequence of a
client that has none running, where another client has several.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_left, insort_right
from collections.abc import Collection, Iterable
from operator import attrgetter

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.config import SchedulerConfig
from mlx_tandem.engine.block_manager import BlockManager
from mlx_tandem.engine.fair_turns import FairTurns, absent_clients, surplus_for
from mlx_tandem.engine.plan import Row
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.prefix import Match

OVERTAKEN_FOR_SLOT = 32
"""Most requests that may overtake a request that waits for an adapter slot."""

_PRIORITY = attrgetter("priority")


class RunQueue:
    """The sequences of all open requests by whether they run, and the seats, blocks and slots that they hold.

    Attributes:
        waiting: Sequences without a seat, by priority, then by their turns. Their siblings are not in it.
        running: Sequences with a seat, by priority, then first come first.
        moving: Running sequences that wait for a slot to continue under another version, by id.
        parked: Sequences without a seat that wait for something else, by id.
        preemptions: Number of preemptions since the start.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, slots: SlotTable):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.moving: dict[int, Sequence] = {}
        self.parked: dict[int, Sequence] = {}
        self.preemptions = 0
        self._config = config
        self._blocks = blocks
        self._slots = slots
        self._seats = list(range(config.max_num_seqs - 1, -1, -1))
        self._uploads: list[tuple[int, str]] = []  # for the next plan
        self._preempted: list[int] = []  # requests, since they were asked for
        self._turns = FairTurns()
        self._displaced: list[Sequence] = []  # in favour of others, since `begin_waiting` began
        self._newest = -1  # the highest id of all requests that were added

    @property
    def num_running(self) -> int:
        """Number of sequences that have a seat."""
        return self._config.max_num_seqs - len(self._seats)

    @property
    def num_waiting(self) -> int:
        """Number of choices that wait for a seat."""
        return sum(1 + len(s.siblings) for s in self.waiting) + len(self.parked)

    def add(self, s: Sequence) -> None:
        """Let a new sequence wait for the turn of its client, before later requests of this client at its priority.

        A request is added late if its adapter had to be read or its grammar compiled. Ids are given in the order in
        which requests come. Sequences that have run before are not overtaken.
        """
        answer = self._turns.answer(s)
        for x in (s, *s.siblings):
            x.charged = answer
        s.turn = self._turns.take(s.priority, s.request.client, s.cost)
        if s.request.id < self._newest:
            s.turn = min([w.turn for w in self.waiting if _is_late_for(w, s)], default=s.turn)
        self._newest = max(self._newest, s.request.id)
        place = bisect_right(self.waiting, s.priority, key=_PRIORITY)
        while place > 0 and _is_behind(self.waiting[place - 1], s):
            place -= 1
        self.waiting.insert(place, s)

    def follow(self, s: Sequence) -> None:
        """Note that a running sequence continues under its `next_adapter` once that has a slot."""
        self.moving[s.id] = s

    def move(self) -> None:
        """Let sequences continue under the versions that they follow, where these have slots."""
        for s in list(self.moving.values()):
            self._move(s)

    def take_preempted(self) -> list[int]:
        """Return the requests that were preempted since the last call, once for each time."""
        preempted = self._preempted
        if preempted:
            self._preempted = []
        return preempted

    def take_uploads(self) -> tuple[tuple[int, str], ...]:
        """Return the adapters (slot, digest) that the plan that is being made should write.

        The sequence of an upload may have ended: an adapter that nobody uses is not written, so it is not resident.
        """
        uploads = tuple([(slot, digest) for slot, digest in self._uploads if self._slots.references(digest)])
        for _, digest in set(self._uploads) - set(uploads):
            self._slots.lost(digest)
        self._uploads = []
        return uploads

    def begin_waiting(self, left_out: Collection[int]) -> None:
        """Let waiting sequences run while there are seats, blocks for all of their tokens, and adapter slots.

        A sequence waits while another reads a prompt with the same beginning, or the drive returns more of its blocks.
        The first of each client that has none running comes before those of clients that have some.
        """
        before, absent = self.waiting, set[int]()
        if before and self._turns.has_several(before[0].priority):
            absent = absent_clients(before, self.running)
        if absent:
            self.waiting = sorted(before, key=lambda s: s.id not in absent)
        blocked: list[Sequence] = []
        patience = OVERTAKEN_FOR_SLOT  # the least that is left among the blocked
        while self.waiting and patience > 0:
            s = self.waiting[0]
            if s.pending or len(blocked) > OVERTAKEN_FOR_SLOT or s.request.id in left_out:
                break
            group = [s, *s.siblings]
            # Nobody is displaced for a sequence that would then wait for something else.
            waits = not self._may_have_slot(s) or (s.id in absent and self._awaits(s, self._blocks.match(s)))
            if not waits:
                match = self._find_room(s, group)
                if match is None:
                    break
                waits = self._awaits(s, match)
            del self.waiting[0]
            if waits or not self._take_slot(group):
                blocked.append(s)
                patience = min(patience, OVERTAKEN_FOR_SLOT - s.overtaken)
                continue
            for b in blocked:
                b.overtaken += 1
            patience -= bool(blocked)
            self._turns.begun(s.priority, s.turn)
            self._blocks.begin(s)
            for x in group:
                x.seat = self._seats.pop()
            insort_right(self.running, s, key=_PRIORITY)
        self.waiting[:0] = blocked
        if absent:  # whoever did not begin goes back to its place
            places = {s.id: place for place, s in enumerate(before)}
            self.waiting.sort(key=lambda s: (s.priority, places.get(s.id, -1)))
        for s in self._displaced:
            self.resume(s)
        self._displaced = []

    def _awaits(self, s: Sequence, match: Match) -> bool:
        """Return whether another sequence reads the prompt of `s` now, or the drive returns more of its blocks."""
        return self._blocks.leaders.leader(s, match) is not None or self._blocks.awaits(s, match)

    def _find_room(self, s: Sequence, group: list[Sequence]) -> Match | None:
        """Return the cached prefix of `s` if there are seats for `group` and blocks for the rest; else None."""
        while True:
            if len(group) <= len(self._seats):
                match = self._blocks.match(s)
                running = self.running
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
        return not most or sum(x.most_tokens * (1 + len(x.siblings)) for x in (*self.running, s)) <= most

    def _displace_for(self, s: Sequence) -> bool:
        """Preempt a sequence in favour of a user's sequence; return whether there was one.

        It is the last one made for training, or else the last one of the client with most, if that of `s` has none.
        """
        if s.request.background or not self.running:
            return False
        if self.running[-1].request.background:
            self.preempt(self.running[-1])
            return True
        victim = surplus_for(s, self.running, len(self._seats))
        if victim is not None:
            self.preempt(victim, parks=True)  # it would come before `s`
            self._displaced.append(victim)
        return victim is not None

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
        return len({s.adapter_digest for s in self.running if not s.request.background} - {None})

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
        del self.moving[s.id]

    def fork(self, s: Sequence) -> None:
        """Let the siblings of `s` run: all of the prompt but its last token is computed and shared.

        Each then computes the last prompt token itself, which draws its own first token.
        """
        siblings, s.siblings = s.siblings, []
        at = self.running.index(s) + 1
        for f in siblings:
            if self._blocks.fork(s, f):
                self.running.insert(at, f)
                at += 1
            else:
                self._leave(f)
                insort_left(self.waiting, f, key=_PRIORITY)

    def reserve(self, s: Sequence, positions: int, rows: Iterable[Row]) -> bool:
        """Take blocks for `positions` of `s`; return False when `s` itself had to be preempted.

        If blocks are missing, sequences without a row in this plan give back blocks outside their windows, and then the
        last of them are preempted.
        """
        if positions <= s.room or self._blocks.reserve(s, positions):
            return True
        planned = {row.sequence for row in rows}
        for x in self.running:
            if x.id not in planned:
                self._blocks.slide(x)
        while not self._blocks.reserve(s, positions):
            victim = next(v for v in reversed(self.running) if v.id not in planned)
            self.preempt(victim)
            if victim is s:
                return False
        return True

    def preempt(self, s: Sequence, *, parks: bool = False) -> None:
        """Let a running sequence give everything back and wait again; with `parks`, not before `resume`.

        What it has read is set aside for it.
        """
        self._blocks.unpublished.set_aside(s)
        self.preemptions += 1
        self._preempted.append(s.request.id)
        self.running.remove(s)
        for x in (s, *s.siblings):
            self._leave(x)
        self.parked[s.id] = s
        if not parks:
            self.resume(s)

    def resume(self, s: Sequence) -> None:
        """Let a parked sequence wait for a seat."""
        del self.parked[s.id]
        # A sequence that was admitted and had no row yet comes after those that had one.
        insort_left(self.waiting, s, key=lambda x: (x.priority, x.cached is None))

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
            del self.moving[s.id]
        s.seat, s.slot, s.is_seated = -1, -1, False

    def remove(self, s: Sequence, others: Iterable[Sequence]) -> None:
        """Take out a sequence that has ended, whether it waits or runs. `others`: the open choices of its request."""
        for leader in others:
            if s in leader.siblings:
                leader.siblings.remove(s)
                self._leave(s)
                return
        if s.cached is not None:
            self._turns.answered(s.priority, s.request.client, s.charged, s.generated)
        place = bisect_left(self.waiting, s.priority, key=_PRIORITY)  # for the sibling that takes its place
        if s in self.running:
            self.running.remove(s)
        elif s.id in self.parked:
            del self.parked[s.id]
        elif s in self.waiting:
            place = self.waiting.index(s)
            del self.waiting[place]
            client = s.request.client
            if not any(w.request.client == client and w.priority == s.priority for w in self.waiting):
                self._turns.left(s.priority, client, s.cost)
        self._leave(s)
        if s.siblings:  # nobody computes their prompt any more, so the next of them starts over
            heir, *rest = s.siblings
            for f in s.siblings:
                self._leave(f)
            heir.siblings, heir.overtaken, heir.cached, heir.turn = rest, s.overtaken, s.cached, s.turn
            self.waiting.insert(place, heir)

    def fail(self, uploads: Iterable[tuple[int, str]]) -> None:
        """Preempt everybody after a failed step. `uploads`: those of the lost plans.

        Nobody holds a slot then, and uploads may not have been written, so their adapters are not resident.
        """
        for s in list(reversed(self.running)):
            self.preempt(s)
        for _, digest in [*uploads, *self._uploads]:
            self._slots.lost(digest)
        self._uploads = []

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert the invariants; for tests, between steps."""
        held = [s.seat for s in sequences if s.seat >= 0]
        assert sorted(held + self._seats) == list(range(self._config.max_num_seqs)), "a seat is lost or shared"
        siblings = [f for s in (*self.running, *self.waiting) for f in s.siblings]
        everyone = [*self.running, *self.waiting, *self.parked.values(), *siblings]
        assert sorted(s.id for s in everyone) == sorted(s.id for s in sequences), "a sequence is lost or doubled"
        assert all(s.seat >= 0 for s in self.running)
        assert all(s.seat < 0 for s in (*self.waiting, *self.parked.values()))
        assert not any(s.siblings for s in self.parked.values()), "the prompt is shared that a row has read to its end"
        assert all(s.seat >= 0 and s.next_adapter is not None for s in self.moving.values())
        assert self.moving.keys() == {s.id for s in sequences if s.next_adapter is not None}
        for queue in (self.waiting, self.running):
            assert queue == sorted(queue, key=_PRIORITY), "the order of priorities is lost"


def _is_behind(waiting: Sequence, s: Sequence) -> bool:
    """Return whether a waiting sequence has not run yet and has a later turn than `s`, at the same priority."""
    is_later = (waiting.turn, waiting.request.id) > (s.turn, s.request.id)
    return is_later and waiting.cached is None and waiting.priority == s.priority


def _is_late_for(waiting: Sequence, s: Sequence) -> bool:
    """Return whether `s` came before a waiting sequence of its client and priority, which has not run yet."""
    own, given = waiting.request, s.request
    is_of_client = own.client == given.client and waiting.priority == s.priority
    return is_of_client and waiting.cached is None and own.id > given.id
