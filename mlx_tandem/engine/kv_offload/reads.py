"""Reads: which blocks come from the drive for which waiting sequence.

A waiting sequence may have the blocks of its prefix read from the drive. It waits for them, but not for long. Only what
memory lacks is read. With states, a read ends at a block whose state the drive or memory has.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlx_tandem.engine.kv_offload.drive import Link
from mlx_tandem.kv.disk.records import BlockId
from mlx_tandem.kv.hashing import Chain
from mlx_tandem.kv.prefix import Match, PrefixCache, find

READ_BYTES = 1 << 30
"""Most bytes that are read for waiting sequences at a time."""

WORTH_READING = 64
"""Fewest tokens for which the drive is asked."""

READ_SECONDS = 5.0
"""Most seconds that a sequence waits for the drive."""

_MOST_READS = 2
"""Most times that the drive is asked for one sequence before it runs."""


@dataclass(slots=True)
class _Fetch:
    """A read for one waiting sequence: the blocks from number `first` to `end`, and the state at `end`, if any.

    `records` are those of the blocks and then that of the state, `sizes` their bytes; `payloads` are there once the
    read is done. `key` is that of the last block. `reads` counts the reads for this sequence; `deadline` is in seconds
    of time.monotonic.
    """

    first: int
    end: int
    key: bytes
    records: list[BlockId]
    sizes: list[int]
    with_state: bool
    reads: int = 1
    ticket: int = 0
    deadline: float = 0.0
    payloads: list[memoryview] | None = None


@dataclass(frozen=True, slots=True)
class Prefix:
    """The computed prefix of a sequence: what memory has of it, and what the drive has returned.

    `tables` has the blocks in memory for each group, from the first on; `whole` is the number of whole blocks that the
    prefix has. `loads` has for each of the other blocks that are needed its group, its number and its content.
    """

    tables: list[list[int]]
    whole: int
    loads: list[tuple[int, int, memoryview]] = field(default_factory=list)


class KVReads:
    """The reads from the drive for waiting sequences.

    What is read is handed out only for the sequence, the namespace and the tokens that it was read for.
    """

    def __init__(self, link: Link, caches: Sequence[PrefixCache], seconds: float):
        """Begin without reads. A sequence waits for the drive up to `seconds`."""
        self._link = link
        self._caches = caches
        self._size = caches[0].block_size
        self._seconds = seconds
        self._fetches: dict[int, _Fetch] = {}  # by sequence
        self._tickets: dict[int, int] = {}  # by ticket of a read under way: its sequence
        self._firsts: dict[bytes, int] = {}  # by key of the first record of a read under way: its sequence
        self.hit_tokens = 0  # tokens that came from the drive for sequences that ran

    @property
    def is_reading(self) -> bool:
        """Whether a read from the drive is under way."""
        return bool(self._tickets)

    def poll(self) -> None:
        """Take in finished reads, and give up those that have taken too long."""
        if self._link.drive is None or not self._tickets:
            return
        for ticket, payloads in self._link.drive.poll():
            if ticket in self._tickets:
                fetch = self._done(self._tickets[ticket])
                whole = [len(p) == size for p, size in zip(payloads, fetch.sizes, strict=False)]
                fetch.payloads = payloads[: [*whole, False].index(False)]
        now = time.monotonic()
        for ticket, sequence in list(self._tickets.items()):
            if self._fetches[sequence].deadline < now:
                self._link.drive.forget(ticket)
                self._done(sequence).payloads = []

    def awaits(self, sequence: int, chain: Chain, tokens: Sequence[int], match: Match) -> bool:
        """Return whether a waiting sequence, of which memory has `match`, should wait for the drive.

        The first call begins a read. A later call begins another one if what was read cannot be used any more.
        """
        fetch = self._fetches.get(sequence)
        if fetch is None:
            return self._begin(sequence, chain, tokens, match, 1)
        if fetch.payloads is None:
            if match.whole >= fetch.end:
                self.forget(sequence)
            return match.whole < fetch.end
        unused = self.coming(sequence, chain, tokens, match).whole == match.whole
        if fetch.reads < _MOST_READS and fetch.payloads and unused:
            return self._begin(sequence, chain, tokens, match, fetch.reads + 1)
        return False

    def take(self, sequence: int, chain: Chain, tokens: Sequence[int], match: Match) -> Prefix:
        """Return the prefix with which a sequence begins, of which memory has `match`, and drop its read."""
        prefix = self.coming(sequence, chain, tokens, match)
        self.forget(sequence)
        self.hit_tokens += (prefix.whole - match.whole) * self._size
        return prefix

    def coming(self, sequence: int, chain: Chain, tokens: Sequence[int], match: Match) -> Prefix:
        """Return what `take` would return: `match`, or a longer prefix with what was read."""
        fetch = self._fetches.get(sequence)
        memory = Prefix(match.tables, match.whole)
        if fetch is None or not fetch.payloads or chain.keys[fetch.end - 1 : fetch.end] != [fetch.key]:
            return memory  # if the key differs, the sequence has moved to another adapter
        blocks = fetch.payloads[:-1] if fetch.with_state else fetch.payloads
        link, tables, known = self._link, match.tables, match.whole
        end = fetch.first + len(fetch.payloads)
        if link.states.nbytes:
            if len(fetch.payloads) < len(fetch.records):
                return memory
            end = fetch.end
            known, tables = self._in_memory(chain, tokens, end)
        if end <= match.whole or known < fetch.first:
            return memory
        loads = [
            (group, i, part)
            for i, payload in enumerate(blocks[known - fetch.first :], known)
            for group, part in link.blocks.parts(payload)
        ]
        if not all(tables[group] for group in link.states.groups):
            if not fetch.with_state:
                return memory
            loads += [(group, end - 1, part) for group, part in link.states.parts(fetch.payloads[-1])]
        return Prefix(tables, end, loads)

    def forget(self, sequence: int) -> None:
        """Drop the read for a sequence that does not wait any more."""
        fetch = self._fetches.get(sequence)
        if fetch is None:
            return
        if fetch.payloads is None:
            assert self._link.drive is not None
            self._link.drive.forget(fetch.ticket)
            self._done(sequence)
        del self._fetches[sequence]

    def _in_memory(self, chain: Chain, tokens: Sequence[int], end: int) -> tuple[int, list[list[int]]]:
        """Return what memory has of a prefix of `end` blocks: the number of blocks of keys and values, and each group's
        table. A table of states is empty unless memory has the state at `end`.
        """
        link = self._link
        tables: list[list[int]] = [[] for _ in self._caches]
        known = end
        if link.blocks.groups:
            before = find([self._caches[i] for i in link.blocks.groups], chain, tokens[: end * self._size])
            known = before.whole
            for i, table in zip(link.blocks.groups, before.tables, strict=True):
                tables[i] = table
        states = [self._caches[i].whole(chain, tokens, end) for i in link.states.groups]
        for i, table in zip(link.states.groups, states, strict=True):
            tables[i] = table if all(len(t) == end for t in states) else []
        return known, tables

    def _begin(self, sequence: int, chain: Chain, tokens: Sequence[int], match: Match, reads: int) -> bool:
        """Begin to read what continues `match`, if that is worth it; return whether to wait for the drive."""
        last = (len(tokens) - 1) // self._size
        if self._link.drive is None or last <= match.whole:
            return False
        chain.key(last - 1, tokens, self._size)
        fetch = self._longest(chain, tokens, match, last)
        if fetch is None:
            return False
        if fetch.records[0].key in self._firsts:  # another sequence reads the same and will run first
            return True
        self.forget(sequence)
        fetch.reads, fetch.deadline = reads, time.monotonic() + self._seconds
        fetch.ticket = self._link.drive.read(fetch.records)
        self._fetches[sequence] = fetch
        self._tickets[fetch.ticket] = self._firsts[fetch.records[0].key] = sequence
        return True

    def _longest(self, chain: Chain, tokens: Sequence[int], match: Match, last: int) -> _Fetch | None:
        """Return the read for the longest prefix of at most `last` blocks that memory and the drive have together;
        None when it is not worth reading.
        """
        blocks, states = self._link.blocks, self._link.states
        room = READ_BYTES - sum(sum(f.sizes) for f in self._fetches.values())
        least = match.whole + -(-WORTH_READING // self._size)
        if not states.nbytes:
            end = min(self._reach(chain, match.whole, last), match.whole + room // blocks.nbytes)
            return self._fetch(chain, tokens, match.whole, end, with_state=False) if end >= least else None
        known, _ = self._in_memory(chain, tokens, last)
        for end in range(self._reach(chain, known, last), least - 1, -1):
            if not self._has_state(chain.keys[end - 1]):
                continue
            first, tables = self._in_memory(chain, tokens, end)
            with_state = not all(tables[group] for group in states.groups)
            size = (end - first) * blocks.nbytes + with_state * states.nbytes
            if size <= room and self._reach(chain, first, end) == end:
                return self._fetch(chain, tokens, first, end, with_state=with_state)
        return None

    def _reach(self, chain: Chain, known: int, last: int) -> int:
        """Return how many blocks there are with those that the drive has behind the first `known`, `last` at most."""
        assert self._link.drive is not None
        return known + self._link.drive.longest(chain.keys[known:last]) if self._link.blocks.nbytes else last

    def _has_state(self, key: bytes) -> bool:
        """Return whether memory or the drive has the state after the block with this key."""
        assert self._link.drive is not None
        states = self._link.states
        in_memory = all(self._caches[i].found(key) is not None for i in states.groups)
        return in_memory or self._link.drive.longest((states.key(key),)) == 1

    def _fetch(self, chain: Chain, tokens: Sequence[int], first: int, end: int, *, with_state: bool) -> _Fetch:
        """Return a read of the blocks from number `first` to `end`, and of the state there."""
        link, size = self._link, self._size
        wanted = [(link.blocks, i) for i in range(first, end) if link.blocks.nbytes]
        wanted += [(link.states, end - 1)] if with_state else []
        records = [
            link.id(form, chain.namespace(i), chain.parent(i), chain.keys[i], tokens[i * size : (i + 1) * size])
            for form, i in wanted
        ]
        return _Fetch(first, end, chain.keys[end - 1], records, [form.nbytes for form, _ in wanted], with_state)

    def _done(self, sequence: int) -> _Fetch:
        """Return the read for a sequence, which is not under way any more."""
        fetch = self._fetches[sequence]
        del self._tickets[fetch.ticket], self._firsts[fetch.records[0].key]
        return fetch

    def check(self, waiting: Iterable[int]) -> None:
        """Assert the invariants; for tests, between steps."""
        assert self._fetches.keys() <= set(waiting), "something is read for nobody"
        under_way = {i: f for i, f in self._fetches.items() if f.payloads is None}
        assert self._tickets == {f.ticket: i for i, f in under_way.items()}, "a ticket is lost"
        assert self._firsts == {f.records[0].key: i for i, f in under_way.items()}, "a first key is lost"
