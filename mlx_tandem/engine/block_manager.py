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

from collections.abc import Iterable

from mlx_tandem.engine.block_writes import BlockWrites
from mlx_tandem.engine.draft_blocks import DraftBlocks
from mlx_tandem.engine.kv_offload.offload import KVOffload
from mlx_tandem.engine.kv_offload.reads import Prefix
from mlx_tandem.engine.plan import Bytes
from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.prefix_leaders import PrefixLeaders
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.engine.snapshots import Snapshots
from mlx_tandem.engine.unpublished import Unpublished
from mlx_tandem.kv.groups import CacheGroup, room_of
from mlx_tandem.kv.pool import SCRATCH
from mlx_tandem.kv.prefix import Match, PrefixCache, PrefixCounts, find


class BlockManager:
    """The blocks of all sequences in all groups of a model.

    Attributes:
        groups: The cache groups of the model.
        offload: The KV offload of all groups, if there is one.
        writes: What the next plans write into blocks.
        drafts: The blocks that sequences hold for drafts.
        snapshots: The snapshots of states, and how prompts are cut for them.
        leaders: Who computes which block now.
        unpublished: What sequences have computed and nobody else may find yet.
    """

    def __init__(
        self, groups: Iterable[CacheGroup], caches: Iterable[PrefixCache] = (), offload: KVOffload | None = None
    ):
        """Create it without sequences.

        `caches`: one for each group, in the same order; empty when requests share nothing.
        """
        self.groups = tuple(groups)
        self.offload = offload
        self._size = self.groups[0].pool.block_size
        self._caches = tuple(caches)
        self._keys = PrefixKeys(self._caches, self._size)
        self.writes = BlockWrites(self.groups)
        self.drafts = DraftBlocks(self.groups)
        self.snapshots = Snapshots(self.groups, self._caches, self._keys)
        self.unpublished = Unpublished(self._caches, self._keys, self.writes, self._size)
        self.leaders = PrefixLeaders(self._keys if self._caches else None, self._size)

    def match(self, s: Sequence) -> Match:
        """Return the cached prefix of a waiting sequence, without its last token, which is always computed.

        Where every position of the prompt has to be computed, the match is empty.
        """
        if not self._caches or s.reads_whole_prompt:
            return Match([[] for _ in self.groups], [SCRATCH for _ in self.groups])
        return find(self._caches, self._keys.chain(s), s.content[:-1], s.aside)

    def short(self, s: Sequence, match: Match, running: int) -> CacheGroup | None:
        """Return a group that lacks blocks for `s` to begin and leave one for each of the `running` sequences; None: no
        group.

        The running sequences need another block soon, so a sequence that took the last blocks would only be preempted.
        """
        offload = self.offload
        prefix = Prefix(match.tables, match.whole)
        if offload is not None:
            prefix = offload.reads.coming(s.id, self._keys.chain(s), s.content, match)
        for group, blocks in zip(self.groups, prefix.tables, strict=True):
            begin, end = self._own(group, s, len(blocks), prefix.whole)
            idle = sum(1 for b in blocks if b != SCRATCH and not group.pool.count[b])
            if max(end - begin, 1) + idle + running > group.pool.free_blocks:
                return group
        return None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest sequence that could ever run."""
        return min(group.longest for group in self.groups)

    def read_ahead(self, s: Sequence) -> None:
        """Begin to read from the drive what it has of a request that has just come."""
        if self.offload is not None:
            self.awaits(s, self.match(s))

    def awaits(self, s: Sequence, match: Match) -> bool:
        """Return whether a waiting sequence should wait for the drive, and begin to read what the drive has of it."""
        if self.offload is None or s.reads_whole_prompt:
            return False
        return self.offload.reads.awaits(s.id, self._keys.chain(s), s.content, match)

    def forget(self, s: Sequence) -> None:
        """Drop what is being read from the drive for a sequence that does not wait any more, and what is set aside."""
        if self.offload is not None:
            self.offload.reads.forget(s.id)
        self.unpublished.forget(s)

    def begin(self, s: Sequence) -> None:
        """Give `s` blocks for all of its tokens, or for as many as a window holds at once.

        The first blocks are those found in the prefix cache; then come those that the drive has returned, then new
        ones. Call it only when no group is `short` or nobody runs.
        """
        match = self.match(s)
        prefix = Prefix(match.tables, match.whole)
        if self.offload is not None:
            prefix = self.offload.reads.take(s.id, self._keys.chain(s), s.content, match)
        extra = match.extra if prefix.whole == match.whole else 0
        tables = []
        for group, found, source in zip(self.groups, prefix.tables, match.sources, strict=True):
            pool = group.pool
            begin, end = self._own(group, s, len(found), prefix.whole)
            seen = group.first_needed(prefix.whole * self._size)
            blocks = [b if i >= seen else SCRATCH for i, b in enumerate(found)]
            pool.share(b for b in blocks if b != SCRATCH)
            if extra:
                pool.share((source,))  # otherwise the allocation below might take it
            own = pool.allocate(end - begin)
            if extra:
                pool.release((source,))
            if own is None:  # the allocation needs the source block itself
                extra, own = 0, pool.allocate(end - begin)
            assert own is not None, "an empty engine has room for every request that was queued"
            tables.append((*blocks, *[SCRATCH] * (begin - len(blocks)), *own))
        s.tables = tuple(tables)
        for table, source in zip(s.tables, match.sources, strict=True) if extra else ():
            self.writes.copy(source, table[match.whole])
        for i, block, content in prefix.loads:
            if s.tables[i][block] != SCRATCH:
                self.writes.load(s.tables[i][block], content)
        s.room = room_of(self.groups, s.tables)
        s.published = 0 if s.aside else match.whole
        s.scheduled = prefix.whole * self._size + extra
        s.boundaries = self.snapshots.boundaries(s)
        self.leaders.announce(s)

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
                self.writes.copy(source, target)
            tables.append(own)
        sibling.tables = tuple(tables)
        sibling.room = room_of(self.groups, sibling.tables)
        sibling.scheduled, sibling.published, sibling.boundaries = s.scheduled, s.published, set(s.boundaries)
        # The two may have moved to a newer version of their adapter at different times.
        sibling.is_pure = s.is_pure and sibling.is_pure and s.adapter_digest == sibling.adapter_digest
        if self._caches and sibling.is_pure:
            if shared:
                self._keys.key(s, shared - 1)
            sibling.chain = self._keys.chain(s).fork()
        return True

    def count(self, s: Sequence) -> None:
        """Count the prefix hits of a request that begins. What is found again after a preemption is no hit."""
        s.cached = s.scheduled
        if self._caches and not s.reads_whole_prompt:
            self._caches[0].note(s.prompt_length, s.cached)

    def reserve(self, s: Sequence, positions: int) -> bool:
        """Take blocks for so many positions of `s`. Return False, and take none, when there are too few free ones."""
        self.snapshots.thin(s)
        if s.has_drawn:
            self.slide(s)
        each = list(zip(self.groups, s.tables, strict=True))
        if any(group.lacks(table, positions) > group.pool.free_blocks for group, table in each):
            return False
        s.tables = tuple([group.take(table, positions) for group, table in each])
        s.room = room_of(self.groups, s.tables)
        return True

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
                self.writes.scrub_vacant(group, gone)
        return slid

    def publish(self, s: Sequence) -> None:
        """Let others find the blocks of `s` from which a finite token has been drawn."""
        self.leaders.retract(s)
        s.has_drawn = True
        if not self._caches or not s.is_pure:
            return
        first, known = s.published, s.content[:-1]
        for cache, table in zip(self._caches, s.tables, strict=True):
            s.published = cache.publish(self._keys.chain(s), known, table, first)
        self.unpublished.forget(s, are_finite=True)

    def leave(self, s: Sequence) -> None:
        """Give back what a running sequence holds."""
        if s.has_drawn:
            self.publish(s)
        self.leaders.retract(s)
        for group, table in zip(self.groups, s.tables, strict=False):  # `tables` is empty until it has blocks
            self.writes.forget_copies(table)
            group.release(table)
        self.writes.forget_loads(s.tables)
        s.tables, s.room, s.published, s.scheduled, s.has_drawn, s.is_pure = (), 0, 0, 0, False, True

    def mix(self, s: Sequence) -> None:
        """Note that `s` continues under another adapter over its blocks, which nobody else may use from here on."""
        self.leaders.retract(s)
        s.is_pure = False

    def spoil(self, blocks: Iterable[int]) -> None:
        """Let nobody find blocks that may hold values that are not finite, and clean those that are free."""
        blocks = set(blocks) - {SCRATCH}
        for cache in self._caches:
            cache.drop(blocks)
        if self.offload is not None:
            self.offload.saves.spoil(blocks)
        self.writes.scrub(blocks)

    def distrust(self) -> None:
        """Forget all cached content, since the runner starts again from an empty cache."""
        self.writes.distrust()
        for cache in self._caches:
            cache.clear()
        if self.offload is not None:
            self.offload.saves.distrust()

    def poll(self) -> None:
        """Take in what the drive has read."""
        if self.offload is not None:
            self.offload.reads.poll()

    def take_loads(self) -> tuple[tuple[int, Bytes], ...]:
        """Return the loads (block, its bytes) for the plan that is being made."""
        return () if self.offload is None else self.writes.take_loads(self.offload.link.step_bytes)

    def take_saves(self) -> tuple[int, ...]:
        """Return the blocks whose bytes the plan that is being made should return."""
        return () if self.offload is None else self.offload.saves.take()

    def saved(self, payloads: Iterable[bytes]) -> None:
        """Take in the bytes of the saved blocks of the oldest plan with saves."""
        assert self.offload is not None
        self.offload.saves.saved(payloads)

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counters of the first group's prefix cache."""
        return self._caches[0].counts() if self._caches else PrefixCounts()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert the invariants; for tests, between steps."""
        sequences = list(sequences)
        begun = [s for s in sequences if s.tables]
        assert all(len(t) == 0 for s in sequences if s.seat < 0 for t in s.tables), "blocks without a seat"
        for i, group in enumerate(self.groups):
            group.pool.check([s.tables[i] for s in begun])
        assert all(s.room == min(map(len, s.tables), default=0) * self._size for s in sequences), "room is off"
        for cache in self._caches:
            cache.check()
        if self.offload is not None:
            self.offload.reads.check(s.id for s in sequences if s.seat < 0)
        self.writes.check()
        self.leaders.check(sequences)

    def _own(self, group: CacheGroup, s: Sequence, found: int, whole: int) -> tuple[int, int]:
        """Return the range of new blocks that `s` gets when it begins with `whole` computed blocks, of which the first
        `found` are in the pool.
        """
        known = whole * self._size
        return max(found, group.first_needed(known)), group.end_at_begin(known, len(s.tokens))
