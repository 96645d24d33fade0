"""Requests and their adapters: a request goes to the scheduler once its adapter is in memory.

Adapters are read on other threads, so that no step waits for a disk. A request whose adapter is being read, or has to
wait until others can leave memory, waits here in the order of arrival.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.adapters.store import AdapterStore
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapter_holds import AdapterHolds
from mlx_tandem.engine.loading import Loader
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.types import AdapterRef, AdapterSource, Request

log = logging.getLogger(__name__)

OVERTAKEN_FOR_MEMORY = 64
"""Most requests that may overtake a request that waits for room in memory."""


@dataclass(slots=True)
class Arrived:
    """The result of `Adapters.poll`: requests that may run, versions that may be followed, and answers to the front."""

    requests: list[Request] = field(default_factory=list)
    followed: list[AdapterRef] = field(default_factory=list)
    answers: list[m.Outbound] = field(default_factory=list)


class Reread(NamedTuple):
    """The key of a read that brings a known adapter back into memory."""

    digest: str
    source: AdapterSource


class Adapters:
    """The adapters that the engine knows, and the requests that wait for one of them. Used on the engine's thread."""

    def __init__(
        self,
        store: AdapterStore,
        loader: Loader[m.LoadAdapter | Reread],
        slots: SlotTable,
        pieces: Iterator[None] | None = None,
    ):
        """Create the engine's adapters, of which none is there yet.

        `pieces` make ready what only steps with adapters need, a piece at each `next`; None: it is ready.
        """
        self.store = store
        self.holds = AdapterHolds(store, slots)
        self._loader = loader
        self._slots = slots
        self._reading: set[str] = set()  # digests that requests wait for
        self._waiting: deque[Request] = deque()
        self._overtaken = 0  # how many requests have overtaken the first that waits
        self._pieces = pieces
        self._wanted = False  # whether an adapter was loaded or asked for, so that the pieces have to be done
        self._unanswered: list[m.Outbound] = []  # answers to loads, until the pieces are done
        self._to_follow: dict[str, AdapterRef] = {}  # by name: versions that are read before anybody follows them

    @property
    def is_idle(self) -> bool:
        """Whether no request and no version waits, nothing is being read, and nothing is being made ready."""
        return not (self._waiting or self._loader.pending or self._to_follow or self.is_preparing or self._unanswered)

    @property
    def is_preparing(self) -> bool:
        """Whether `prepare` has to be called until adapters can be served."""
        return self._pieces is not None and self._wanted

    def prepare(self) -> None:
        """Do the next piece of what has to be made ready before adapters can be served. Nothing else may be in flight
        on the device.
        """
        if self._pieces is None:
            return
        try:
            next(self._pieces)
        except StopIteration:
            self._pieces = None

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being read or has been read and not been taken in."""
        return self._loader.pending > 0

    @property
    def num_waiting(self) -> int:
        """Number of choices of the requests that wait for their adapter."""
        return sum(r.n for r in self._waiting)

    def close(self) -> None:
        """Let the loader's threads end."""
        self._loader.close()

    # messages of the front

    def load(self, message: m.LoadAdapter) -> None:
        """Begin to read a folder; `poll` returns the answer."""
        self._loader.start(message, message.source)

    def know(self, message: m.KnowAdapter) -> None:
        """Take in a version that an earlier engine had loaded; it is read when a request needs it."""
        digest = message.info.digest
        self.store.know(digest, message.source, message.info.memory_bytes, message.pin)
        self._slots.pin(digest, message.pin)

    def unload(self, digest: str) -> None:
        """Forget a version; requests that use it keep it until they end."""
        self._slots.pin(digest, False)
        self.holds.dropped(self.store.forget(digest))

    def publish(self, weights: AdapterWeights) -> None:
        """Take in weights that a trainer of this engine made, so that requests may name them."""
        self._wanted = True
        self.holds.dropped(self.store.hold(weights))

    def can_follow(self, ref: AdapterRef) -> bool:
        """Return whether `ref` is in memory, so that requests may continue under it.

        If it is not, `poll` returns it once it has been read, unless no folder of it is known or a newer version of the
        same name came in between.
        """
        self._to_follow.pop(ref.name, None)
        if ref.digest in self.store and self.store.knows(ref.digest):
            return True
        if self.store.source(ref.digest) is not None:
            self._wanted = True
            self._to_follow[ref.name] = ref
        return False

    def follow(self, ref: AdapterRef, running: Iterable[int]) -> None:
        """Let the `running` requests continue under `ref`, and waiting requests that follow its name begin under it.

        The versions that the running requests used before are held until `AdapterHolds.let_go`.
        """
        for request in running:
            self.holds.move(request, ref.digest)
        self._waiting = deque(structs.replace(r, adapter=ref) if _follows(r, ref) else r for r in self._waiting)

    def hold(self, request: Request) -> bool:
        """Return whether `request` may run now; it then holds its adapter until `AdapterHolds.release`.

        Otherwise it waits, and `poll` returns it later. Raises InvalidRequest (`model_not_found`) for an adapter that
        the engine does not know.
        """
        if request.adapter is None:
            return True
        digest = request.adapter.digest
        if not self.store.knows(digest):
            raise InvalidRequest("this adapter version is not loaded", param="model", code="model_not_found")
        ready = digest in self.store and self._pieces is None
        if ready and (not self._waiting or self._overtaken < OVERTAKEN_FOR_MEMORY):
            self._overtaken += bool(self._waiting)
            self.holds.take(request.id, digest)
            return True
        self._wanted = True
        self._waiting.append(request)
        return False

    def cancel(self, request: int) -> None:
        """Remove a request that waits. Unknown ids are ignored."""
        self._keep_waiting(deque(r for r in self._waiting if r.id != request))

    # results of reading

    def poll(self) -> Arrived:
        """Take in what the loader has read, return what became possible, and start to read what is needed next."""
        arrived = Arrived()
        for key, result in self._loader.results():
            if isinstance(key, Reread):
                arrived.answers += self._reread(key, result)
            elif isinstance(result, TandemError):
                arrived.answers.append(_refused(key, result))
            else:
                self._unanswered.append(self._loaded(key, result))
        if self._pieces is not None:
            return arrived
        arrived.answers += self._unanswered
        self._unanswered = []
        for ref in list(self._to_follow.values()):
            self._look_after(ref, arrived)
        if self._waiting:
            self._pump(arrived)
        return arrived

    def _look_after(self, ref: AdapterRef, arrived: Arrived) -> None:
        """Report a version that is to be followed if it is in memory, else have it read, or drop it
        if it was unloaded.
        """
        if ref.digest in self._reading:
            return
        source = self.store.source(ref.digest)
        if ref.digest in self.store:
            del self._to_follow[ref.name]
            arrived.followed.append(ref)
        elif source is None:  # unloaded meanwhile
            del self._to_follow[ref.name]
        else:
            self._read(ref.digest, source)

    def _loaded(self, message: m.LoadAdapter, result: AdapterWeights) -> m.Outbound:
        """Take in a folder that was read for the front and return the answer."""
        digest = result.info.digest
        self.store.know(digest, message.source, result.info.memory_bytes, message.pin)
        self._slots.pin(digest, message.pin)
        self.store.put(result)
        self._wanted = True
        return m.AdapterLoaded(message.call, result.info)

    def _reread(self, tried: Reread, result: AdapterWeights | TandemError) -> list[m.Outbound]:
        """Take in an adapter that was read again; return the failures of its requests if it cannot be had any more.

        A read that failed is tried with another folder of the adapter, where one is known.
        """
        digest = tried.digest
        self._reading.discard(digest)
        if self.store.get(digest) is not None:  # It has come into memory in another way meanwhile.
            return []
        if self.store.source(digest) is None:
            problem = "was unloaded"
        elif not isinstance(result, TandemError) and result.info.digest == digest:
            self.store.put(result)
            return []
        elif (other := self.store.other_source(digest, tried.source)) is not None:
            self._read(digest, other)
            return []
        elif isinstance(result, TandemError):
            problem = f"cannot be read again: {result.message}"
        else:
            problem = "was changed on disk since it was loaded; load it again to publish its new content"
        for ref in [r for r in self._to_follow.values() if r.digest == digest]:
            log.error("nobody can follow %s: it %s", ref.label, problem)
            del self._to_follow[ref.name]
        lost = [r for r in self._waiting if r.adapter is not None and r.adapter.digest == digest]
        self._keep_waiting(deque(r for r in self._waiting if r not in lost))
        text = "the adapter {} " + problem
        return [
            m.Failed(r.id, "adapter_changed", text.format(r.adapter.label if r.adapter else ""), "model", False)
            for r in lost
        ]

    def _read(self, digest: str, source: AdapterSource) -> None:
        self._reading.add(digest)
        self._loader.start(Reread(digest, source), source)

    def _pump(self, arrived: Arrived) -> None:
        """Let requests run whose adapter is in memory, the oldest first, and have the others' read
        while there is room.
        """
        still: deque[Request] = deque()
        blocked = False
        for request in self._waiting:
            assert request.adapter is not None
            digest = request.adapter.digest
            if digest in self.store and not (blocked and self._overtaken >= OVERTAKEN_FOR_MEMORY):
                self._overtaken += bool(still)
                self.holds.take(request.id, digest)
                arrived.requests.append(request)
                continue
            still.append(request)
            if digest in self.store or digest in self._reading or blocked:
                continue
            source = self.store.source(digest)
            if source is not None and self.store.has_room(digest, self._reading):
                self._read(digest, source)
            else:
                blocked = source is not None
                if source is None:  # unloaded meanwhile
                    still.pop()
                    gone = f"the adapter {request.adapter.label} was unloaded"
                    arrived.answers.append(m.Failed(request.id, "model_not_found", gone, "model", False))
        self._keep_waiting(still)

    def _keep_waiting(self, requests: deque[Request]) -> None:
        """Replace the waiting requests. The count of those that overtook the first begins anew with another first."""
        if not requests or requests[0] is not self._waiting[0]:
            self._overtaken = 0
        self._waiting = requests


def _refused(message: m.LoadAdapter, e: TandemError) -> m.Outbound:
    """Return the answer to a folder that cannot be read."""
    return m.CallFailed(message.call, e.code or "invalid_value", e.message, e.param)


def _follows(request: Request, ref: AdapterRef) -> bool:
    """Return whether a request follows the name of `ref`."""
    return request.follow and request.adapter is not None and request.adapter.name == ref.name
