"""The adapters that requests hold in memory: from their start to their end, and former versions while rows use them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.adapters.store import AdapterStore


class AdapterHolds:
    """The holds of requests on adapters of the store. A held adapter does not leave memory."""

    def __init__(self, store: AdapterStore, slots: SlotTable):
        self._store = store
        self._slots = slots
        self._held: dict[int, str] = {}  # request -> digest
        self._left: dict[int, set[str]] = {}  # request -> former digests that it still holds

    @property
    def has_left(self) -> bool:
        """Whether there are former versions for `let_go` to give back."""
        return bool(self._left)

    def take(self, request: int, digest: str) -> None:
        """Let a request hold an adapter that is in memory."""
        self._store.acquire(digest)
        self._held[request] = digest

    def move(self, request: int, digest: str) -> None:
        """Let a request hold another version that is in memory. It holds the former one until `let_go`."""
        old = self._held[request]
        if old == digest:
            return
        left = self._left.setdefault(request, set())
        if digest in left:
            left.remove(digest)
        else:
            self._store.acquire(digest)
        left.add(old)
        self._held[request] = digest

    def let_go(self, in_use: Callable[[int], Collection[str]]) -> None:
        """Give back former versions of requests. `in_use` returns the digests that a request's sequences still run
        under.
        """
        for request, left in list(self._left.items()):
            used = in_use(request)
            for digest in [d for d in left if d not in used]:
                left.remove(digest)
                self.dropped(self._store.release(digest))
            if not left:
                del self._left[request]

    def release(self, request: int) -> None:
        """Give back the adapter of a request that has ended. Requests without one are ignored."""
        digest = self._held.pop(request, None)
        if digest is not None:
            self.dropped(self._store.release(digest))

    def release_ended(self, open_requests: Container[int]) -> None:
        """Give back the adapters of all requests that are not open any more."""
        for request in [r for r in self._held if r not in open_requests]:
            self.release(request)

    def dropped(self, digests: Iterable[str]) -> None:
        """Forget the slots of adapters that have left memory and are not known any more."""
        for digest in digests:
            if not self._store.knows(digest):  # a known one may come back into memory
                self._slots.forget(digest)
