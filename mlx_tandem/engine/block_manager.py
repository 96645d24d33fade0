"""The blocks that sequences hold: when they take blocks, share them between choices and give them back.

With a prefix cache a sequence begins with blocks that others have computed, and leaves its own blocks to others. A
block is published once a finite token has been drawn from everything up to its end, never while its step is under way.
With KV offload a sequence may begin with blocks that are loaded first, a bounded number in each plan; it runs when all
of them are loaded.

A sequence has a table in each cache group of its model (kv/groups), and every operation covers all groups. Where a
group does not keep all blocks, a sequence gives back blocks that it will not need again when it takes another block.
While it reads its prompt, it does so only when somebody needs the blocks: before a token is drawn from them they cannot
be published. (docs/decisions/sliding-windows.md)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import islice

from mlx_tandem.engine.cost import unpadded_length
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.plan import Bytes
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.pool import SCRATCH, BlockPool
from mlx_tandem.kv.prefix import Match, PrefixCache, PrefixCounts, find

WORTH_WAITING = 64
"""Fewest tokens shared with a running sequence that make waiting for it worthwhile. Waiting takes about two steps."""


SNAPSHOT_TOKENS = 512
"""Fewest tokens before a boundary that gets a snapshot only because it is a power of two of blocks."""


class BlockManager:
    """The blocks of all sequences in all groups of a model.

    `caches`: one for each group, in the same order; empty when requests share nothing. `offload`: the KV offload of all
    groups, if there is one.
    """

    def __init__(
        self, groups: Iterable[CacheGroup], caches: Iterable[PrefixCache] = (), offload: KVOffload | None = None
    ):
        self.groups = tuple(groups)
        self.offload = offload
        self._size = self.groups[0].pool.block_size
        self._with_snapshots = [i for i, group in enumerate(self.groups) if group.snapshots]
        self._caches = tuple(caches)
        self._loads: dict[int, Bytes] = {}  # for the next plans: by the block to write
        self._copies: dict[int, int] = {}  # for the next plan: to block → from block
        self._unclean: set[int] = set()  # blocks that may hold values that are not finite
        self._readers: dict[bytes, Sequence] = {}  # by key: the sequence that computes this block now

    def match(self, s: Sequence) -> Match:
        """Return the cached prefix of a waiting sequence, without its last token, which is always computed.

        Where every position of the prompt has to be computed, the match is empty.
        """
        if not self._caches or s.reads_whole_prompt:
            return Match([[] for _ in self.groups], [SCRATCH for _ in self.groups])
        return find(self._caches, self._chain(s), s.tokens[:-1])

    def short(self, s: Sequence, match: Match, running: int) -> CacheGroup | None:
        """Return a group that lacks blocks for `s` to begin and leave one for each of the `running` sequences; None: no
        group.

        The running sequences need another block soon, so a sequence that took the last blocks would only be preempted.
        """
        coming = 0 if self.offload is None else self.offload.reads.coming(s.id, self._chain(s), match.whole)
        for group, blocks in zip(self.groups, match.tables, strict=True):
            begin, end = self._own(group, s, match, coming)
            idle = sum(1 for b in blocks if b != SCRATCH and not group.pool.count[b])
            if max(end - begin, 1) + idle + running > group.pool.free_blocks:
                return group
        return None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence that could ever run."""
        return min(group.longest for group in self.groups)

    def leader(self, s: Sequence, match: Match) -> Sequence | None:
        """Return a running sequence that is computing what `s` would compute next, if waiting for it is worthwhile.

        Waiting has to save at least WORTH_WAITING tokens, and at least half of what the other sequence has left to
        read, since the other's prompt is read before that of `s` in any case.
        """
        first = match.whole
        last = (len(s.tokens) - 1) // self._size
        if not self._caches or not self._readers or first >= last or s.reads_whole_prompt:
            return None
        chain = self._chain(s)
        leader = self._readers.get(self._key(s, first))
        if leader is None or leader.next_adapter is not None or leader.priority > s.priority:
            return None
        self._key(s, last - 1)
        theirs = self._chain(leader).keys
        shared = bisect_left(range(min(last, len(theirs))), True, key=lambda i: chain.keys[i] != theirs[i])
        saved = (shared - first) * self._size - match.extra
        left = len(leader.tokens) - leader.scheduled
        if saved < max(WORTH_WAITING, left / 2):
            return None
        leader.boundaries.add(first + (saved + match.extra) // self._size)
        return leader

    def read_ahead(self, s: Sequence) -> None:
        """Begin to read from the drive what it has of a request that has just come."""
        if self.offload is not None:
            self.awaits(s, self.match(s))

    def awaits(self, s: Sequence, match: Match) -> bool:
        """Return whether a waiting sequence should wait for the drive, and begin to read what the drive has of it."""
        if self.offload is None or s.reads_whole_prompt:
            return False
        return self.offload.reads.awaits(s.id, self._chain(s), s.tokens, match.whole)

    def forget(self, s: Sequence) -> None:
        """Drop what is being read from the drive for a sequence that does not wait any more."""
        if self.offload is not None:
            self.offload.reads.forget(s.id)

    def begin(self, s: Sequence) -> None:
        """Give `s` blocks for all of its tokens, or for as many as a window holds at once.

        The first blocks are those found in the prefix cache; then come those that the drive has returned, then new
        ones. Call it only when no group is `short` or nobody runs.
        """
        match = self.match(s)
        payloads = [] if self.offload is None else self.offload.reads.take(s.id, self._chain(s), match.whole)
        extra = 0 if payloads else match.extra
        tables = []
        for group, blocks, source in zip(self.groups, match.tables, match.sources, strict=True):
            pool = group.pool
            begin, end = self._own(group, s, match, len(payloads))
            seen = group.first_needed((match.whole + len(payloads)) * self._size)
            blocks = [b if i >= seen else SCRATCH for i, b in enumerate(blocks)]
            pool.share(b for b in blocks if b != SCRATCH)
            if extra:
                pool.share((source,))  # otherwise the allocation below might take it
            own = pool.allocate(end - begin)
            if extra:
                pool.release((source,))
            if own is None:  # the allocation needs the source block itself
                extra, own = 0, pool.allocate(end - begin)
            assert own is not None, "an empty engine has room for every request that was queued"
            tables.append((*blocks, *[SCRATCH] * (begin - match.whole), *own))
        s.tables = tuple(tables)
        for table, source in zip(s.tables, match.sources, strict=True) if extra else ():
            self._copies[table[match.whole]] = self._copies.get(source, source)
        for i, payload in enumerate(payloads, match.whole):
            assert self.offload is not None
            for table, part in zip(s.tables, self.offload.parts(payload), strict=True):
                if table[i] != SCRATCH:
                    self._loads[table[i]] = part
        self._measure(s)
        s.published = match.whole
        s.scheduled = (s.published + len(payloads)) * self._size + extra
        s.boundaries = self._boundaries(s)
        self._announce(s)

    def fork(self, s: Sequence, sibling: Sequence) -> bool:
        """Let `sibling` continue where `s` is: share whole blocks and copy the last one. Return False without room."""
        sibling.cached = s.cached
        shared, rest = divmod(s.scheduled, self._size)
        if rest and not all(group.pool.free_blocks for group in self.groups):
            return False
        tables = []
        for group, table in zip(self.groups, s.tables, strict=True):
            own, copied = group.copy(table, s.scheduled)
            if copied is not None:
                source, target = copied
                self._copies[target] = self._copies.get(source, source)
            tables.append(own)
        sibling.tables = tuple(tables)
        self._measure(sibling)
        sibling.scheduled, sibling.published, sibling.boundaries = s.scheduled, s.published, set(s.boundaries)
        # The two may have moved to a newer version of their adapter at different times.
        sibling.is_pure = s.is_pure and sibling.is_pure and s.adapter_digest == sibling.adapter_digest
        if self._caches and sibling.is_pure:
            if shared:
                self._key(s, shared - 1)
            sibling.chain = self._chain(s).fork()
        return True

    def count(self, s: Sequence) -> None:
        """Count the prefix hits of a request that begins. What is found again after a preemption is no hit."""
        s.cached = s.scheduled
        if self._caches and not s.reads_whole_prompt:
            self._caches[0].note(s.prompt_length, s.cached)

    def reserve(self, s: Sequence, positions: int) -> bool:
        """Take blocks for so many positions of `s`. Return False, and take none, when there are too few free ones."""
        if self._with_snapshots:
            self._thin(s)
        if s.has_drawn:
            self.slide(s)
        each = list(zip(self.groups, s.tables, strict=True))
        if any(group.lacks(table, positions) > group.pool.free_blocks for group, table in each):
            return False
        s.tables = tuple([group.take(table, positions) for group, table in each])
        self._measure(s)
        return True

    def chunk(self, s: Sequence, tokens: int) -> int:
        """Return how many of the next `tokens` of the prompt of `s` one row may have.

        With states, rows have no padding, end with the block in which they begin within, and end at boundaries that
        are worth a snapshot.
        """
        if not self._with_snapshots:
            return tokens
        size, start = self._size, s.scheduled
        ends = [b * size - start for b in (s.boundaries if start % size == 0 else {start // size + 1})]
        tokens = unpadded_length(min([tokens, *(end for end in ends if end > 0)]))
        return tokens // size * size or tokens

    @property
    def floats(self) -> bool:
        """Whether a row may begin where only the device knows."""
        return all(group.floats for group in self.groups)

    def draft(self, s: Sequence, drafts: int, running: int) -> int:
        """Take blocks for up to `drafts` tokens after the newest of `s`; return for how many there were blocks.

        Drafts leave one block to each of the `running` sequences, so that nobody is preempted for a draft.
        """
        while drafts and not self._has_room_for(s, drafts, running):
            drafts -= 1
        if drafts:
            each = zip(self.groups, s.tables, strict=True)
            taken = [group.take_drafts(table, s.scheduled, drafts) for group, table in each]
            s.tables, s.spare = tuple([table for table, _ in taken]), tuple([spare for _, spare in taken])
            self._measure(s)
        return drafts

    def _has_room_for(self, s: Sequence, drafts: int, running: int) -> bool:
        """Return whether every group has blocks for the drafts and one for each running sequence."""
        for group, table in zip(self.groups, s.tables, strict=True):
            blocks = group.draft_blocks(table, s.scheduled, drafts)
            if blocks and blocks + running > group.pool.free_blocks:
                return False
        return True

    def truncate(self, s: Sequence, start: int, positions: int) -> None:
        """Keep the first `positions` of `s` and give back the other blocks that `draft` took for a
        row from `start` on.
        """
        spares = s.spare or [()] * len(self.groups)
        s.tables = tuple(
            [
                group.truncate(table, spare, start, positions)
                for group, table, spare in zip(self.groups, s.tables, spares, strict=True)
            ]
        )
        s.spare = ()
        self._measure(s)

    def slide(self, s: Sequence) -> bool:
        """Give back blocks that no later position of `s` needs; return whether there were any.

        No row of `s` may be in the plan that is being made.
        """
        computed, slid = min(s.scheduled, len(s.tokens) - 1), False
        for i, group in enumerate(self.groups):
            table, gone = group.give_back(s.tables[i], computed)
            if not gone:
                continue
            slid = True
            if s.has_drawn:
                self.publish(s)
            s.tables = (*s.tables[:i], table, *s.tables[i + 1 :])
            group.pool.release(gone)
            if group.divides and not s.has_drawn:  # nothing has shown that its values are finite
                self._unclean |= {b for b in gone if group.pool.is_vacant(b)}
        return slid

    def _thin(self, s: Sequence) -> None:
        """Give back the states of `s` that no later position needs and that are not worth a snapshot.

        No row of `s` may be in the plan that is being made.
        """
        computed = min(s.scheduled, len(s.tokens) - 1)
        for i in self._with_snapshots:
            pool = self.groups[i].pool
            table, gone = self.groups[i].give_back(s.tables[i], computed, s.boundaries)
            if not gone:
                continue
            s.tables = (*s.tables[:i], table, *s.tables[i + 1 :])
            if self._caches:
                self._caches[i].drop([b for b in gone if pool.count[b] == 1])
            pool.release(gone)

    def _boundaries(self, s: Sequence) -> set[int]:
        """Return at the end of which blocks a snapshot of the state of `s`, which begins, is worth keeping.

        These are where it was found, where the prompt ends, where another prompt with the same beginning went another
        way, and powers of two.
        """
        if not (self._with_snapshots and self._caches):
            return set()
        last = (len(s.tokens) - 1) // self._size
        shared = [len(cache.whole(self._chain(s), s.tokens, last)) for cache in self._caches if cache.group.keeps_all]
        powers = {1 << n for n in range(last.bit_length()) if (1 << n) * self._size >= SNAPSHOT_TOKENS}
        return {*powers, *shared, s.published, (s.prompt_length - 1) // self._size} - {0}

    def publish(self, s: Sequence) -> None:
        """Let others find the blocks of `s` from which a finite token has been drawn."""
        self._retract(s)
        s.has_drawn = True
        if not self._caches or not s.is_pure:
            return
        first, known = s.published, s.tokens[:-1]
        for cache, table in zip(self._caches, s.tables, strict=True):
            s.published = cache.publish(self._chain(s), known, table, first)

    def leave(self, s: Sequence) -> None:
        """Give back what a running sequence holds."""
        if s.has_drawn:
            self.publish(s)
        self._retract(s)
        # A copy into a block that is given back would overwrite the content of its next owner.
        for group, table in zip(self.groups, s.tables, strict=False):  # `tables` is empty until it has blocks
            for b in table:
                self._copies.pop(b, None)
            group.release(table)
        for group, spare in zip(self.groups, s.spare, strict=False):
            group.release(spare)
        for b in (b for table in s.tables for b in table) if self._loads else ():
            if not self._pool_of(b).count[b]:
                self._loads.pop(b, None)
        s.tables, s.spare, s.room, s.published, s.scheduled, s.has_drawn, s.is_pure = (), (), 0, 0, 0, False, True

    def mix(self, s: Sequence) -> None:
        """Note that `s` continues under another adapter over its blocks, which nobody else may use from here on."""
        self._retract(s)
        s.is_pure = False

    def spoil(self, blocks: Iterable[int]) -> None:
        """Let nobody find blocks that may hold values that are not finite, and clean those that are free."""
        blocks = set(blocks) - {SCRATCH}
        for cache in self._caches:
            cache.drop(blocks)
        if self.offload is not None:
            self.offload.saves.spoil(blocks)
        # A block that has a new owner already makes that owner fail too, and is passed here again then.
        self._unclean |= {b for b in blocks if not self._pool_of(b).count[b]}

    def distrust(self) -> None:
        """Forget all cached content, since the runner starts again from an empty cache."""
        self._unclean = set()
        for cache in self._caches:
            cache.clear()
        if self.offload is not None:
            self.offload.saves.distrust()

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies (from block, to block) for the plan that is being made.

        Stale values of a block are masked, but NaN survives a mask: blocks that may hold NaN are overwritten with the
        scratch block.
        """
        scrubs = [(self._pool_of(b).scratch, b) for b in sorted(self._unclean - self._copies.keys())]
        copies = (*scrubs, *((a, b) for b, a in self._copies.items()))
        self._copies, self._unclean = {}, set()
        return copies

    def poll(self) -> None:
        """Take in what the drive has read."""
        if self.offload is not None:
            self.offload.reads.poll()

    def take_saves(self) -> tuple[int, ...]:
        """Return the blocks whose bytes the plan that is being made should return."""
        return () if self.offload is None else self.offload.saves.take()

    def saved(self, payloads: Iterable[bytes]) -> None:
        """Take in the bytes of the saved blocks of the oldest plan with saves."""
        assert self.offload is not None
        self.offload.saves.saved(payloads)

    def is_loading(self, s: Sequence) -> bool:
        """Return whether a sequence has blocks whose contents no plan has loaded yet."""
        return not all(self._loads.keys().isdisjoint(table) for table in s.tables)

    @property
    def has_loads(self) -> bool:
        """Whether any block waits to be loaded."""
        return bool(self._loads)

    def take_loads(self) -> tuple[tuple[int, Bytes], ...]:
        """Return the loads (block, its bytes) for the plan that is being made."""
        if self.offload is None or not self._loads:
            return ()
        loads = tuple(islice(self._loads.items(), self.offload.link.step_blocks))
        for block, _ in loads:
            del self._loads[block]
        return loads

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counters of the first group's prefix cache."""
        return self._caches[0].counts() if self._caches else PrefixCounts()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants; for tests, between steps."""
        sequences = list(sequences)
        begun = [s for s in sequences if s.tables]
        assert all(len(t) == 0 for s in sequences if s.seat < 0 for t in (*s.tables, *s.spare)), "blocks without a seat"
        for i, group in enumerate(self.groups):
            group.pool.check([*(s.tables[i] for s in begun), *(s.spare[i] for s in begun if s.spare)])
        assert all(s.room == min(map(len, s.tables), default=0) * self._size for s in sequences), "room is off"
        for cache in self._caches:
            cache.check()
        if self.offload is not None:
            self.offload.reads.check(s.id for s in sequences if s.seat < 0)
        assert all(self._pool_of(b).count[b] for b in self._loads), "what nobody holds is loaded"
        readers = {id(s): s for s in sequences if s.seat >= 0 and not s.has_drawn}
        assert all(id(s) in readers and s.announced == key for key, s in self._readers.items()), "a reader is gone"

    def _chain(self, s: Sequence) -> Chain:
        """Return the keys of the blocks of `s` under its adapter."""
        if s.chain is None:
            s.chain = self._caches[0].chain(s.adapter_digest or "")
        return s.chain

    def _key(self, s: Sequence, block: int) -> bytes:
        """Return the key of a full block of `s`."""
        return self._chain(s).key(block, s.tokens, self._size)

    def _own(self, group: CacheGroup, s: Sequence, match: Match, coming: int) -> tuple[int, int]:
        """Return the range of new blocks that `s` gets when it begins; `coming` of them are
        loaded from the drive.
        """
        known = (match.whole + coming) * self._size
        return max(match.whole, group.first_needed(known)), group.end_at_begin(known, len(s.tokens))

    def _measure(self, s: Sequence) -> None:
        """Set the number of positions for which all tables of `s` have blocks."""
        s.room = min([group.room(table) for group, table in zip(self.groups, s.tables, strict=True)])

    def _pool_of(self, block: int) -> BlockPool:
        """Return the pool that a block belongs to."""
        return next(group.pool for group in self.groups if block < len(group.pool.count))

    def _announce(self, s: Sequence) -> None:
        """Note which block `s` computes next, so that others with the same tokens may wait for it."""
        if not self._caches:
            return
        blocks = len(s.tokens) // self._size
        if s.published < blocks:
            self._key(s, blocks - 1)
            key = self._key(s, s.published)
            if self._readers.setdefault(key, s) is s:
                s.announced = key

    def _retract(self, s: Sequence) -> None:
        """Take back what `_announce` has noted."""
        if s.announced is not None:
            del self._readers[s.announced]
            s.announced = None
