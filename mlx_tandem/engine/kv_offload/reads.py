"""Reads: which blocks come from the drive for which waiting sequence.

A waiting sequence may have the blocks of its prefix read from the drive. It waits for them, but not for long.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlx_tandem.engine.kv_offload.drive import Link
from mlx_tandem.kv.disk.records import BlockId
from mlx_tandem.kv.hashing import Chain

READ_BYTES = 1 << 30
"""Most bytes that are read for waiting sequences at a time, at least one block."""

WORTH_READING = 64
"""Fewest tokens for which the drive is asked."""

READ_SECONDS = 5.0
"""Most seconds that a sequence waits for the drive."""

_MOST_READS = 2
"""Most times that the drive is asked for one sequence before it runs."""


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


class KVReads:
    """The reads from the drive for waiting sequences.

    What is read is handed out only for the sequence, the namespace and the tokens that it was read for.
    """

    def __init__(self, link: Link, block_size: int, seconds: float):
        """Begin without reads. A sequence waits for the drive up to `seconds`."""
        self._link = link
        self._size = block_size
        self._seconds = seconds
        self._fetches: dict[int, _Fetch] = {}  # by sequence
        self._tickets: dict[int, int] = {}  # by ticket of a read under way: its sequence
        self._firsts: dict[bytes, int] = {}  # by first key of a read under way: its sequence
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
                whole = [len(p) == self._link.block_bytes for p in payloads]
                fetch.payloads = payloads[: [*whole, False].index(False)]
        now = time.monotonic()
        for ticket, sequence in list(self._tickets.items()):
            if self._fetches[sequence].deadline < now:
                self._link.drive.forget(ticket)
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
            assert self._link.drive is not None
            self._link.drive.forget(fetch.ticket)
            self._done(sequence)
        del self._fetches[sequence]

    def _begin(self, sequence: int, chain: Chain, tokens: Sequence[int], known: int, reads: int) -> bool:
        """Begin to read the blocks after the first `known`, if there are enough; return whether to
        wait for the drive.
        """
        size = self._size
        last = (len(tokens) - 1) // size
        if self._link.drive is None or last <= known:
            return False
        chain.key(last - 1, tokens, size)
        keys = chain.keys[known:last]
        n = self._link.drive.longest(keys)
        if n * size < WORTH_READING:
            return False
        if keys[0] in self._firsts:  # another sequence reads the same blocks and will run first
            return True
        self.forget(sequence)
        held = sum(len(f.blocks) for f in self._fetches.values())
        n = min(n, max(READ_BYTES // self._link.block_bytes, 1) - held)
        if n * size < WORTH_READING:
            return False
        parents = [chain.parent(known), *keys]
        blocks = [
            self._link.id(chain.namespace, parents[i], keys[i], tokens[(known + i) * size : (known + i + 1) * size])
            for i in range(n)
        ]
        ticket = self._link.drive.read(blocks)
        self._fetches[sequence] = _Fetch(known, blocks, reads, ticket, time.monotonic() + self._seconds)
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
