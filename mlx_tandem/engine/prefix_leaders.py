"""Who computes which block now, so that sequences with the same beginning wait for it instead of computing it, too."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

from mlx_tandem.engine.prefix_keys import PrefixKeys
from mlx_tandem.engine.sequence import Sequence
from mlx_tandem.kv.prefix import Match

WORTH_WAITING = 64
"""Fewest tokens shared with a running sequence that make waiting for it worthwhile. Waiting takes about two steps."""


class PrefixLeaders:
    """The running sequences by the block that each computes next. `keys`: None when requests share nothing."""

    def __init__(self, keys: PrefixKeys | None, block_size: int):
        self._keys = keys
        self._size = block_size
        self._readers: dict[bytes, Sequence] = {}  # by key

    def announce(self, s: Sequence) -> None:
        """Note which block `s` computes next, so that others with the same tokens may wait for it."""
        if self._keys is None:
            return
        blocks = len(s.tokens) // self._size
        if s.published < blocks:
            self._keys.key(s, blocks - 1)
            key = self._keys.key(s, s.published)
            if self._readers.setdefault(key, s) is s:
                s.announced = key

    def retract(self, s: Sequence) -> None:
        """Take back what `announce` has noted."""
        if s.announced is not None:
            del self._readers[s.announced]
            s.announced = None

    def leader(self, s: Sequence, match: Match) -> Sequence | None:
        """Return a running sequence that is computing what `s` would compute next, if waiting for it is worthwhile.

        Waiting has to save at least WORTH_WAITING tokens, and at least half of what the other sequence has left to
        read, since the other's prompt is read before that of `s` in any case.
        """
        first = match.whole
        last = (len(s.tokens) - 1) // self._size
        if self._keys is None or not self._readers or first >= last or s.reads_whole_prompt:
            return None
        chain = self._keys.chain(s)
        leader = self._readers.get(self._keys.key(s, first))
        if leader is None or leader.next_adapter is not None or leader.priority > s.priority:
            return None
        self._keys.key(s, last - 1)
        theirs = self._keys.chain(leader).keys
        shared = bisect_left(range(min(last, len(theirs))), True, key=lambda i: chain.keys[i] != theirs[i])
        saved = (shared - first) * self._size - match.extra
        left = len(leader.tokens) - leader.scheduled
        if saved < max(WORTH_WAITING, left / 2):
            return None
        leader.boundaries.add(first + (saved + match.extra) // self._size)
        return leader

    def check(self, sequences: Collection[Sequence]) -> None:
        """Assert the invariants; for tests, between steps."""
        readers = {id(s): s for s in sequences if s.seat >= 0 and not s.has_drawn}
        assert all(id(s) in readers and s.announced == key for key, s in self._readers.items()), "a reader is gone"
