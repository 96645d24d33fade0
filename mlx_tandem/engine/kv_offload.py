"""KV offload: which blocks go to the drive, and which come from it for which sequence.

A block is saved when the pool gives it out again, a little earlier where there is time, or as soon as it is full
(`write_through`). The number of blocks that a step reads for the drive is limited; blocks beyond it are not saved, and
are counted. A waiting sequence may have the blocks of its prefix read from the drive. It waits for them, but not for
long.

Where a model has several cache groups, a block on the drive combines one block of each group, for the same tokens. It
can be saved while all of them can be found.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Protocol

from mlx_tandem.kv.disk.cache import Read
from mlx_tandem.kv.disk.records import BlockId, Payload
from mlx_tandem.kv.groups import CacheGroup
from mlx_tandem.kv.hashing import ROOT, Chain
from mlx_tandem.kv.pool import SCRATCH
from mlx_tandem.kv.prefix import Entry, PrefixCache

STEP_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20, "metal": 16 << 20}
"""Bytes that one step reads for the drive, and that one step writes from it, at least one block. On a CPU they take
30 ms."""

READ_BYTES = 1 << 30
"""Most bytes that are read for waiting sequences at a time, at least one block."""

WORTH_READING = 64
"""Fewest tokens for which the drive is asked."""

READ_SECONDS = 5.0
"""Most seconds that a sequence waits for the drive."""

_AHEAD = 256
"""Number of the blocks to be given out next that each step considers for saving while few blocks are vacant."""

_MOST_READS = 2
"""Most times that the drive is asked for one sequence before it runs."""


class Drive(Protocol):
    """The part of `kv/disk/cache.py` that the offload uses: blocks by their ids, without waiting for the drive."""

    def room(self, size: int) -> int:
        """Return how many blocks of `size` bytes would be accepted now."""

    def longest(self, keys: Sequence[bytes]) -> int:
        """Return how many of the first blocks of a chain the drive has."""

    def put(self, block: BlockId, payload: Payload) -> bool:
        """Queue a block to be written; return False if it was dropped."""

    def read(self, blocks: Sequence[BlockId]) -> int:
        """Begin to read a chain of blocks; return its ticket."""

    def poll(self) -> list[Read]:
        """Return the reads that have finished."""

    def forget(self, ticket: int) -> None:
        """Drop a read that nobody waits for any more."""


@dataclass(slots=True)
class _Fetch:
    """A read for one waiting sequence: its blocks from number `first` on, and their payloads once the read is done.

    `reads` counts the reads for this sequence; `deadline` is in seconds of time.monotonic.
    """

    first: int
    blocks: list[BlockId]
    reads: int
    ticket: int
    deadline: float
    payloads: list[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class _Save:
    """A block to be saved: its entry, and the block of each pool that holds the content."""

    entry: Entry
    blocks: tuple[int, ...]


class KVOffload:
    """The link between the drive and the prefix caches of all cache groups; it does nothing until it has a drive.

    What is saved under an id is what the block held while it could be found by that id. What is read is handed out only
    for the sequence, the namespace and the tokens that it was read for.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        caches: Sequence[PrefixCache],
        *,
        write_through: bool = False,
        step_bytes: int = STEP_BYTES["cpu"],
        read_seconds: float = READ_SECONDS,
    ):
        self._pools = [group.pool for group in groups]
        self._caches = caches
        self._parts = [group.block_bytes for group in groups]
        self._size = self._pools[0].block_size
        self._block_bytes = sum(self._parts)
        self._write_through = write_through
        self._read_seconds = read_seconds
        self._drive: Drive | None = None
        self._base = b""
        self._namespaces: dict[bytes, bytes] = {}
        self.step_blocks = max(1, step_bytes // self._block_bytes)
        self._evicted: dict[bytes, _Save] = {}  # by key: saved in the next plan, or never
        self._wanted: dict[bytes, Entry] = {}  # by key: saved in some plan, while they can be found
        self._offered: dict[int, Entry] = {}  # by block: entries that were saved ahead, which happens once
        self._flights: deque[list[_Save | None]] = deque()  # saves of each plan in flight; None: spoilt
        self._under_way: set[bytes] = set()  # keys of the saves in flight
        self._fetches: dict[int, _Fetch] = {}  # by sequence
        self._tickets: dict[int, int] = {}  # by ticket of a read under way: its sequence
        self._firsts: dict[bytes, int] = {}  # by first key of a read under way: its sequence
        self.hit_tokens = 0  # tokens that came from the drive for sequences that ran
        self.unsaved = 0  # blocks that were given out before they could be saved
        for cache in caches:
            cache.on_fill, cache.on_evict = self._on_fill, self._on_evict

    def open(self, drive: Drive, base: bytes) -> None:
        """Begin to use a drive. `base`: the digest of everything that its blocks have in common."""
        self._drive, self._base = drive, base
        if self._write_through:
            self.save_all()

    # -- to the drive ---------------------------------------------------------------------------------------------

    @property
    def is_saving(self) -> bool:
        """Whether blocks are on their way to the drive or can be sent now."""
        if self._drive is None or not (self._wanted or self._evicted or self._flights):
            return False
        return bool(self._flights) or self._drive.room(self._block_bytes) > 0

    @property
    def has_unsaved(self) -> bool:
        """Whether there are blocks to be saved, even if the drive accepts none now."""
        return bool(self._wanted or self._flights)

    def save_all(self) -> None:
        """Mark all whole blocks that can be found, and that the drive lacks, to be saved."""
        if self._drive is not None:
            self._wanted |= {e.key: e for e in self._caches[-1].entries() if e.key and self._lacks(e)}

    def take_saves(self) -> tuple[int, ...]:
        """Return the blocks that the plan that is being made should read for the drive."""
        if self._drive is None:
            return ()
        self._look_ahead()
        if not (self._evicted or self._wanted):
            return ()
        on_the_way = sum(map(len, self._flights))
        room = max(0, min(self.step_blocks, self._drive.room(self._block_bytes) - on_the_way))
        evicted, self._evicted = list(self._evicted.values()), {}
        # The end of a sequence is evicted before its beginning, which is worth more: the last ones are kept.
        chosen = evicted[max(len(evicted) - room, 0) :]
        self.unsaved += len(evicted) - len(chosen)
        for key in list(self._wanted) if len(chosen) < room else ():
            found = self._found(self._wanted.pop(key))
            if found is not None:
                chosen.append(found)
                if len(chosen) == room:
                    break
        if chosen:
            self._flights.append(list(chosen))
            self._under_way |= {save.entry.key for save in chosen if save.entry.key is not None}
        return tuple(block for save in chosen for block in save.blocks)

    def saved(self, payloads: Iterable[Payload]) -> None:
        """Hand the contents of the blocks of the oldest plan with saves to the drive."""
        assert self._drive is not None
        each = iter(payloads)
        for save in self._flights.popleft():
            parts = [next(each) for _ in self._pools]
            if save is not None:
                entry = save.entry
                assert entry.key is not None
                self._under_way.discard(entry.key)
                payload = parts[0] if len(parts) == 1 else b"".join(parts)
                self._drive.put(self._id(entry.namespace, entry.parent, entry.key, entry.tokens), payload)

    def spoil(self, blocks: set[int]) -> None:
        """Do not save blocks that may hold values that are not finite."""
        self._evicted = {key: s for key, s in self._evicted.items() if blocks.isdisjoint(s.blocks)}
        self._wanted = {key: e for key, e in self._wanted.items() if e.block not in blocks}
        for flight in self._flights:
            spoilt = {s.entry.key: s for s in flight if s is not None and not blocks.isdisjoint(s.blocks)}
            self._under_way -= spoilt.keys()
            flight[:] = [None if s is None or s.entry.key in spoilt else s for s in flight]

    def distrust(self) -> None:
        """Save nothing of what is in the pools now, since it cannot be trusted."""
        self._evicted, self._wanted, self._flights, self._under_way = {}, {}, deque(), set()

    def _look_ahead(self) -> None:
        """Mark blocks that will be given out soon to be saved, each entry once."""
        for pool, cache in zip(self._pools, self._caches, strict=True):
            for block in pool.oldest(_AHEAD) if pool.vacant_blocks < pool.num_blocks // 8 else ():
                entry = cache.entry(block)
                if entry is not None and self._offered.get(block) is not entry and self._lacks(entry):
                    assert entry.key is not None
                    self._wanted[entry.key] = self._offered[block] = entry

    def _on_fill(self, entry: Entry) -> None:
        """Mark a block that has become full to be saved, with `write_through`."""
        if self._write_through and self._lacks(entry):
            assert entry.key is not None
            self._wanted[entry.key] = entry

    def _on_evict(self, entry: Entry) -> None:
        """Mark a block that is being given out to be saved in the next plan, before it is overwritten."""
        assert entry.key is not None
        self._wanted.pop(entry.key, None)
        found = self._found(entry, entry.block)
        if found is not None:
            self._evicted[entry.key] = found

    def _found(self, entry: Entry, going: int = SCRATCH) -> _Save | None:
        """Return the save of an entry if the drive lacks it and all pools still have it.

        `going`: a block that cannot be found any more but still holds the content.
        """
        if not self._lacks(entry):
            return None
        assert entry.key is not None
        blocks = [
            going if pool.has(going) else cache.holder(entry.key) or SCRATCH
            for pool, cache in zip(self._pools, self._caches, strict=True)
        ]
        return None if SCRATCH in blocks else _Save(entry, tuple(blocks))

    def _lacks(self, entry: Entry) -> bool:
        """Return whether the drive lacks a whole block that is not on its way there."""
        if self._drive is None or entry.key is None or entry.key in self._under_way:
            return False
        return not self._drive.longest((entry.key,))

    def _id(self, namespace: bytes, parent: bytes, key: bytes, tokens: Iterable[int]) -> BlockId:
        """Return the id of a block on the drive, whose namespace names the model as well."""
        own = self._namespaces.get(namespace)
        if own is None:
            if len(self._namespaces) > 4096:
                self._namespaces.clear()
            own = self._namespaces[namespace] = sha256(self._base + namespace).digest()
        return BlockId(own, key, b"" if parent == ROOT else parent, tuple(tokens))

    # -- from the drive -------------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether a read from the drive is under way."""
        return bool(self._tickets)

    def poll(self) -> None:
        """Take in finished reads, and give up those that have taken too long."""
        if self._drive is None or not self._tickets:
            return
        for ticket, payloads in self._drive.poll():
            if ticket in self._tickets:
                fetch = self._done(self._tickets[ticket])
                whole = [len(p) == self._block_bytes for p in payloads]
                fetch.payloads = payloads[: [*whole, False].index(False)]
        now = time.monotonic()
        for ticket, sequence in list(self._tickets.items()):
            if self._fetches[sequence].deadline < now:
                self._drive.forget(ticket)
                self._done(sequence).payloads = []

    def awaits(self, sequence: int, chain: Chain, tokens: Sequence[int], known: int) -> bool:
        """Return whether a waiting sequence with `known` whole blocks in the pool should wait for the drive.

        Begin to read more blocks when asked for the first time, and again when blocks have left the pool since then.
        """
        fetch = self._fetches.get(sequence)
        if fetch is None or (fetch.payloads is not None and fetch.first > known and fetch.reads < _MOST_READS):
            return self._begin(sequence, chain, tokens, known, fetch.reads + 1 if fetch else 1)
        if fetch.payloads is None and known >= fetch.first + len(fetch.blocks):
            self.forget(sequence)
            return False
        return fetch.payloads is None

    def take(self, sequence: int, chain: Chain, known: int) -> list[memoryview]:
        """Return the blocks read for a sequence after its first `known`, and drop its read."""
        payloads = self._come(sequence, chain, known)
        self.forget(sequence)
        self.hit_tokens += len(payloads) * self._size
        return payloads

    def coming(self, sequence: int, chain: Chain, known: int) -> int:
        """Return how many blocks `take` would return."""
        return len(self._come(sequence, chain, known))

    def parts(self, payload: memoryview) -> list[memoryview]:
        """Return the parts of a block's payload, one for each pool."""
        ends = list(accumulate(self._parts))
        return [payload[end - size : end] for end, size in zip(ends, self._parts, strict=True)]

    def _come(self, sequence: int, chain: Chain, known: int) -> list[memoryview]:
        """Return the blocks read for a sequence after its first `known`, as far as their keys are still its own."""
        fetch = self._fetches.get(sequence)
        if fetch is None or fetch.payloads is None or fetch.first > known:
            return []
        payloads: list[memoryview] = []
        skipped = known - fetch.first
        came = zip(fetch.blocks[skipped:], fetch.payloads[skipped:], chain.keys[known:], strict=False)
        for block, payload, key in came:
            if block.key != key:  # the sequence has moved to another adapter
                break
            payloads.append(payload)
        return payloads

    def forget(self, sequence: int) -> None:
        """Drop the read for a sequence that does not wait any more."""
        fetch = self._fetches.get(sequence)
        if fetch is None:
            return
        if fetch.payloads is None:
            assert self._drive is not None
            self._drive.forget(fetch.ticket)
            self._done(sequence)
        del self._fetches[sequence]

    def _begin(self, sequence: int, chain: Chain, tokens: Sequence[int], known: int, reads: int) -> bool:
        """Begin to read the blocks after the first `known`, if there are enough; return whether to
        wait for the drive.
        """
        size = self._size
        last = (len(tokens) - 1) // size
        if self._drive is None or last <= known:
            return False
        chain.key(last - 1, tokens, size)
        keys = chain.keys[known:last]
        n = self._drive.longest(keys)
        if n * size < WORTH_READING:
            return False
        if keys[0] in self._firsts:  # another sequence reads the same blocks and will run first
            return True
        self.forget(sequence)
        held = sum(len(f.blocks) for f in self._fetches.values())
        n = min(n, max(READ_BYTES // self._block_bytes, 1) - held)
        if n * size < WORTH_READING:
            return False
        parents = [chain.parent(known), *keys]
        blocks = [
            self._id(chain.namespace, parents[i], keys[i], tokens[(known + i) * size : (known + i + 1) * size])
            for i in range(n)
        ]
        ticket = self._drive.read(blocks)
        self._fetches[sequence] = _Fetch(known, blocks, reads, ticket, time.monotonic() + self._read_seconds)
        self._tickets[ticket] = self._firsts[keys[0]] = sequence
        return True

    def _done(self, sequence: int) -> _Fetch:
        """Return the read for a sequence, which is not under way any more."""
        fetch = self._fetches[sequence]
        del self._tickets[fetch.ticket], self._firsts[fetch.blocks[0].key]
        return fetch

    def check(self, waiting: Iterable[int]) -> None:
        """Assert the invariants; for tests, between steps."""
        assert self._fetches.keys() <= set(waiting), "something is read for nobody"
        under_way = {i: f for i, f in self._fetches.items() if f.payloads is None}
        assert self._tickets == {f.ticket: i for i, f in under_way.items()}, "a ticket is lost"
        assert self._firsts == {f.blocks[0].key: i for i, f in under_way.items()}, "a first key is lost"
