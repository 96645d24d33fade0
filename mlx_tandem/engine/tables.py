"""The blocks that sequences hold: taken when they are seated, grown, shared between choices, given back.

With a prefix cache a sequence begins with what others have computed, and leaves what it has computed to others. A block
is published once a token that is a number has been drawn from everything up to it, never while its step is under way.
With a disk tier it may begin with blocks that are loaded first, a bounded number in a plan; it runs when all are there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

from mlx_tandem.engine.plan import Bytes
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.engine.tier import Tier
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.pool import SCRATCH, BlockPool
from mlx_tandem.kv.prefix import Match, PrefixCache, PrefixCounts

WORTH_WAITING = 64
"""Tokens that another computes from which on it is worth the two steps that it takes until they are there."""

_NOTHING = Match()


class Tables:
    """`prefixes`: None when nothing is to be shared between requests. `tier`: over both, if there is one."""

    def __init__(self, pool: BlockPool, prefixes: PrefixCache | None = None, tier: Tier | None = None):
        self.pool = pool
        self.prefixes = prefixes
        self.tier = tier
        self._loads: dict[int, Bytes] = {}  # of the next plans: into which block
        self._copies: dict[int, int] = {}  # of the next plan: into which block → from which
        self._unclean: set[int] = set()  # blocks that may hold what is not finite
        self._readers: dict[bytes, Sequence] = {}  # who computes the block of this key now

    def match(self, s: Sequence) -> Match:
        """What is known of a waiting sequence. At least its last token is left to be computed, and where its prompt's
        logprobs are asked for, everything."""
        if self.prefixes is None or s.scores is not None:
            return _NOTHING
        return self.prefixes.find(self._chain(s), s.tokens[:-1])

    def need(self, s: Sequence, match: Match) -> int:
        """How many of the free blocks seating it takes."""
        read = sum(1 for b in match.blocks if self.pool.count[b])
        return self.pool.blocks_for(len(s.tokens)) - read

    def leader(self, s: Sequence, match: Match) -> Sequence | None:
        """A running sequence that computes what `s` would compute next, when it is worth waiting for: it saves many
        tokens, and half of what the other has left to read, which comes before `s` in any case."""
        first = len(match.blocks)
        last = (len(s.tokens) - 1) // self.pool.block_size
        if self.prefixes is None or not self._readers or first >= last or s.scores is not None:
            return None
        chain = self._chain(s)
        leader = self._readers.get(self._key(s, first))
        if leader is None or leader.next_adapter is not None or leader.priority > s.priority:
            return None
        self._key(s, last - 1)
        theirs = self._chain(leader).keys
        shared = bisect_left(range(min(last, len(theirs))), True, key=lambda i: chain.keys[i] != theirs[i])
        saved = (shared - first) * self.pool.block_size - match.extra
        left = len(leader.tokens) - leader.scheduled
        return leader if saved >= max(WORTH_WAITING, left / 2) else None

    def read_ahead(self, s: Sequence) -> None:
        """A request has come: what the drive has of it is there, or under way, when its turn is."""
        if self.tier is not None:
            self.awaits(s, self.match(s))

    def awaits(self, s: Sequence, match: Match) -> bool:
        """Whether a waiting sequence is to wait for the drive, which is asked here for what it has."""
        if self.tier is None or s.scores is not None:
            return False
        return self.tier.awaits(s.id, self._chain(s), s.tokens, len(match.blocks))

    def forget(self, s: Sequence) -> None:
        """It waits for nothing any more."""
        if self.tier is not None:
            self.tier.forget(s.id)

    def seat(self, s: Sequence) -> None:
        """Blocks for all that `s` knows, the first of them those that are found, then those that have come from the
        drive. There is room for `need` blocks."""
        match = self.match(s)
        payloads = [] if self.tier is None else self.tier.take(s.id, self._chain(s), len(match.blocks))
        pool, extra = self.pool, 0 if payloads else match.extra
        fresh = pool.blocks_for(len(s.tokens)) - len(match.blocks)
        pool.share(match.blocks)
        if extra:
            pool.share((match.source,))  # or it might be given out here
        own = pool.allocate(fresh)
        if extra:
            pool.release((match.source,))
        if own is None:  # its place is needed
            extra, own = 0, pool.allocate(fresh)
        assert own is not None, "an empty engine has room for every request that was queued"
        if extra:
            self._copies[own[0]] = self._copies.get(match.source, match.source)
        s.table = match.blocks + own
        self._loads |= zip(own, payloads, strict=False)
        s.published = len(match.blocks)
        s.scheduled = (s.published + len(payloads)) * pool.block_size + extra
        self._announce(s)

    def fork(self, s: Sequence, follower: Sequence) -> bool:
        """`follower` goes on where `s` is: whole blocks are shared, the last one is copied. False: there is no room."""
        if s.cached is None:
            self.count(s)
        follower.cached = s.cached
        shared, rest = divmod(s.scheduled, self.pool.block_size)
        own = self.pool.allocate(1) if rest else []
        if own is None:
            return False
        if rest:
            self._copies[own[0]] = self._copies.get(s.table[shared], s.table[shared])
        self.pool.share(s.table[:shared])
        follower.table = s.table[:shared] + own
        follower.scheduled, follower.published = s.scheduled, s.published
        # They may have gone on under another version one after the other.
        follower.is_pure = s.is_pure and follower.is_pure and s.adapter_digest == follower.adapter_digest
        if self.prefixes is not None and follower.is_pure:
            if shared:
                self._key(s, shared - 1)
            follower.chain = self._chain(s).fork()
        return True

    def count(self, s: Sequence) -> None:
        """The request of `s` begins: what is found again after a preemption is no hit."""
        s.cached = s.scheduled
        if self.prefixes is not None and s.scores is None:
            self.prefixes.note(s.prompt_length, s.cached)

    def missing(self, s: Sequence, positions: int) -> int:
        return max(self.pool.blocks_for(positions) - len(s.table), 0)

    def extend(self, s: Sequence, blocks: int) -> None:
        s.table += self.pool.allocate(blocks) or []

    def publish(self, s: Sequence) -> None:
        """A token of `s` was drawn and is a number: all that it was drawn from is there for others."""
        self._retract(s)
        s.has_drawn = True
        if self.prefixes is None or not s.is_pure:
            return
        s.published = self.prefixes.publish(self._chain(s), s.tokens[:-1], s.table, s.published)

    def leave(self, s: Sequence) -> None:
        """Give back what a running sequence holds."""
        if s.has_drawn:
            self.publish(s)
        self._retract(s)
        # Rows of this plan may still copy into these blocks: a copy for nobody would overwrite their next owner.
        for b in s.table:
            self._copies.pop(b, None)
        self.pool.release(reversed(s.table))  # the last one is the first that others may take
        for b in s.table if self._loads else ():
            if self.pool.count[b] == 0:
                self._loads.pop(b, None)
        s.table, s.published, s.scheduled, s.has_drawn, s.is_pure = [], 0, 0, False, True

    def mix(self, s: Sequence) -> None:
        """From here on `s` computes under another adapter over what it has: that is for nobody else."""
        self._retract(s)
        s.is_pure = False

    def spoil(self, blocks: Iterable[int]) -> None:
        """These may hold what is not finite."""
        blocks = set(blocks)
        if self.prefixes is not None:
            self.prefixes.drop(blocks)
        if self.tier is not None:
            self.tier.spoil(blocks)
        # One that has a new owner already fails that owner, too, and is found here then.
        self._unclean |= {b for b in blocks if self.pool.count[b] == 0}

    def distrust(self) -> None:
        """Nothing that is in the cache can be trusted: the runner starts from an empty one."""
        self._unclean = set()
        if self.prefixes is not None:
            self.prefixes.clear()
        if self.tier is not None:
            self.tier.distrust()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """(from block, to block) for the plan that is being made. A stale value of a block is masked, which NaN
        survives: such blocks are overwritten with the scratch block."""
        scrubs = [(SCRATCH, b) for b in sorted(self._unclean - self._copies.keys())]
        copies = (*scrubs, *((a, b) for b, a in self._copies.items()))
        self._copies, self._unclean = {}, set()
        return copies

    def poll(self) -> None:
        """Takes in what the drive has read."""
        if self.tier is not None:
            self.tier.poll()

    def take_saves(self) -> tuple[int, ...]:
        """Blocks whose bytes the plan that is being made is to bring."""
        return () if self.tier is None else self.tier.take_saves()

    def saved(self, payloads: Iterable[bytes]) -> None:
        """The bytes that the oldest plan with saves has brought."""
        assert self.tier is not None
        self.tier.saved(payloads)

    def is_loading(self, s: Sequence) -> bool:
        """Whether it has blocks whose contents no plan has loaded yet."""
        return bool(self._loads) and not self._loads.keys().isdisjoint(s.table)

    def take_loads(self) -> tuple[tuple[int, Bytes], ...]:
        """(block, what it gets) for the plan that is being made."""
        if self.tier is None or not self._loads:
            return ()
        loads = tuple(islice(self._loads.items(), self.tier.step_blocks))
        for block, _ in loads:
            del self._loads[block]
        return loads

    @property
    def prefix_counts(self) -> PrefixCounts:
        return PrefixCounts() if self.prefixes is None else self.prefixes.counts()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants; for tests, between steps."""
        sequences = list(sequences)
        self.pool.check(s.table for s in sequences)
        if self.prefixes is not None:
            self.prefixes.check()
        if self.tier is not None:
            self.tier.check(s.id for s in sequences if s.seat < 0)
        assert all(self.pool.count[b] for b in self._loads), "what nobody holds is loaded"
        readers = {id(s): s for s in sequences if s.seat >= 0 and not s.has_drawn}
        assert all(id(s) in readers and s.announced == key for key, s in self._readers.items()), "a reader is gone"

    def _chain(self, s: Sequence) -> Chain:
        if s.chain is None:
            assert self.prefixes is not None
            s.chain = self.prefixes.chain(s.adapter_digest or "")
        return s.chain

    def _key(self, s: Sequence, block: int) -> bytes:
        return self._chain(s).key(block, s.tokens, self.pool.block_size)

    def _announce(self, s: Sequence) -> None:
        """Others that want the same may wait for it."""
        if self.prefixes is None:
            return
        blocks = len(s.tokens) // self.pool.block_size
        if s.published < blocks:
            self._key(s, blocks - 1)
            key = self._key(s, s.published)
            if self._readers.setdefault(key, s) is s:
                s.announced = key

    def _retract(self, s: Sequence) -> None:
        if s.announced is not None:
            del self._readers[s.announced]
            s.announced = None
