"""The engine's adapters in memory: which there are, who needs them, and which are dropped when there are too many.

Plain data; nothing is read here. An adapter that open requests use, or that is pinned, stays. The others are
dropped, least recently used first, while there are more than the limits allow. What was once loaded is still known
by its digest and source, so that it can be read again. An adapter that was made here and has no source stays, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.types import AdapterSource

MOST_SOURCES = 8
"""Most folders that are remembered for one content; several names may have it."""


@dataclass
class _Known:
    sources: list[AdapterSource]  # the latest first; empty: it exists in memory only
    nbytes: int
    users: int = 0  # open requests
    pinned: bool = False
    doomed: bool = False  # to be dropped when the last request ends


class AdapterStore:
    """The adapters in memory. `weights` is shared with the runner, which uploads from it.

    At most `most_bytes` bytes and, unless it is 0, `most` adapters are kept.
    """

    def __init__(self, weights: dict[str, AdapterWeights], *, most_bytes: int, most: int = 0):
        self._weights = weights
        self._most_bytes = most_bytes
        self._most = most
        self._known: dict[str, _Known] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # in memory, unused and unpinned; least recently used first
        self._users = 0  # of all adapters
        self.nbytes = 0  # of all adapters in memory
        self.evictions = 0

    def __contains__(self, digest: str) -> bool:
        """Return whether `digest` is in memory."""
        return digest in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def know(self, digest: str, source: AdapterSource, nbytes: int, pinned: bool = False) -> list[str]:
        """Remember that `digest` can be read from `source`, too; its use does not change. Return the digests dropped
        for that.
        """
        known = self._known.get(digest)
        if known is None:
            self._known[digest] = _Known([source], nbytes, pinned=pinned)
        else:
            known.sources = [source, *(s for s in known.sources if s != source)][:MOST_SOURCES]
            known.doomed, known.pinned = False, pinned
            self._sort_in(digest, known)
        return self._shrink(keep=digest)

    def knows(self, digest: str) -> bool:
        """Return whether requests may name `digest`: it is in memory or can be read, and nobody has forgotten it."""
        known = self._known.get(digest)
        return known is not None and not known.doomed

    def source(self, digest: str) -> AdapterSource | None:
        """Return where to read `digest` from; None if that is unknown."""
        known = self._known.get(digest)
        return None if known is None or known.doomed or not known.sources else known.sources[0]

    def get(self, digest: str) -> AdapterWeights | None:
        """Return the weights for requests to use now; None if they are not in memory."""
        return self._weights.get(digest) if self.knows(digest) else None

    def other_source(self, digest: str, wrong: AdapterSource) -> AdapterSource | None:
        """Return another source of `digest`, since `wrong` holds something else by now; None if there is no other."""
        known = self._known[digest]
        others = [s for s in known.sources if s != wrong]
        known.sources = others or known.sources
        return others[0] if others else None

    def put(self, weights: AdapterWeights) -> list[str]:
        """Take a known adapter into memory; return the digests dropped for it."""
        digest, known = weights.info.digest, self._known[weights.info.digest]
        if digest not in self._weights:
            self._weights[digest] = weights
            self.nbytes += known.nbytes
        self._sort_in(digest, known)
        return self._shrink(keep=digest)

    def hold(self, weights: AdapterWeights) -> list[str]:
        """Take an adapter into memory that may be in no folder; without a source it stays until `forget`.

        Return the digests dropped for it.
        """
        known = self._known.setdefault(weights.info.digest, _Known([], weights.info.memory_bytes))
        known.doomed = False
        return self.put(weights)

    def has_room(self, digest: str, loading: Iterable[str] = ()) -> bool:
        """Return whether `digest` fits into memory beside the adapters in `loading`, once idle ones are dropped.

        If nothing else is being read or used there is always room, since waiting would free none.
        """
        others = [self._known[d].nbytes for d in loading if d in self._known]
        if not others and not self._users:
            return True
        count = len(self._weights) - len(self._idle) + len(others)
        nbytes = self.nbytes - sum(self._known[d].nbytes for d in self._idle) + sum(others)
        return nbytes + self._known[digest].nbytes <= self._most_bytes and not 0 < self._most <= count

    def acquire(self, digest: str) -> None:
        """Count one more open request that uses `digest`, which is in memory."""
        assert digest in self._weights
        self._known[digest].users += 1
        self._users += 1
        self._idle.pop(digest, None)

    def release(self, digest: str) -> list[str]:
        """Count one request less; return the digests dropped now."""
        known = self._known[digest]
        known.users -= 1
        self._users -= 1
        assert known.users >= 0, "released more often than acquired"
        if known.doomed and not known.users:
            return self._drop(digest)
        self._sort_in(digest, known)
        return self._shrink()

    def forget(self, digest: str) -> list[str]:
        """Unload `digest` now, or when its last request ends; return the digests dropped now."""
        known = self._known.get(digest)
        if known is None:
            return []
        if known.users:
            known.doomed, known.pinned = True, False
            return []
        return self._drop(digest)

    def users(self, digest: str) -> int:
        """Return how many open requests use `digest`."""
        known = self._known.get(digest)
        return 0 if known is None else known.users

    def check(self) -> None:
        """Raise AssertionError unless the store is consistent. For tests."""
        assert self._users == sum(k.users for k in self._known.values())
        assert self.nbytes == sum(self._known[d].nbytes for d in self._weights)
        unused = {d for d in self._weights if (k := self._known[d]).sources and not k.users and not k.pinned}
        assert all(k.sources or d in self._weights for d, k in self._known.items()), "lost for good"
        assert set(self._idle) == unused
        assert not any(k.doomed and not k.users for k in self._known.values())

    def _sort_in(self, digest: str, known: _Known) -> None:
        self._idle.pop(digest, None)
        if digest in self._weights and known.sources and not known.users and not known.pinned:
            self._idle[digest] = None

    def _over(self) -> bool:
        return self.nbytes > self._most_bytes or 0 < self._most < len(self._weights)

    def _shrink(self, keep: str | None = None) -> list[str]:
        dropped = []
        for digest in list(self._idle):
            if not self._over():
                break
            if digest != keep:
                self._unload(digest)
                self.evictions += 1
                dropped.append(digest)
        return dropped

    def _drop(self, digest: str) -> list[str]:
        if digest in self._weights:
            self._unload(digest)
        del self._known[digest]
        return [digest]

    def _unload(self, digest: str) -> None:
        del self._weights[digest]
        self._idle.pop(digest, None)
        self.nbytes -= self._known[digest].nbytes
