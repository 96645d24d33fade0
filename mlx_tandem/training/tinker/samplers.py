"""Samplers of Tinker's clients: what each samples from, the requests it was sent, and which of them are done."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_tandem.errors import InvalidRequest, NotFound
from mlx_tandem.training.tinker.models import TrainedModel
from mlx_tandem.training.tinker.promises import Promise, Result
from mlx_tandem.training.tinker.versions import Versions
from mlx_tandem.types import AdapterRef, AdapterSource

MOST_SNAPSHOTS = 16
"""Most unnamed snapshots of a session: the one that was used longest ago goes for a new one."""

REMEMBERED = 4096
"""Number of the last requests of a sampler that are recognised when they are sent again, and listed when done."""

REMEMBERING = 256
"""Number of samplers that remember requests: of all clients' samplers those that were asked last."""

CLONE = 1_000_000_000
"""The numbers of a sampler's requests divided by this are the number of the client among those that share it."""


def no_sampler(id: str) -> NotFound:
    """Return the error for a sampler that is not there, or not any more."""
    return NotFound(
        f"there is no sampling session {id[:80]!r}; of unnamed snapshots a session has the {MOST_SNAPSHOTS} that were "
        "used last: save weights under a name to keep them",
        param="sampling_session_id",
    )


class Snapshots:
    """The unnamed snapshots of one session, by the sampler that uses each."""

    def __init__(self, versions: Versions):
        """Begin without snapshots."""
        self._versions = versions
        self._held: OrderedDict[str, AdapterRef] = OrderedDict()

    async def add(self, sampler: str, ref: AdapterRef) -> Sequence[str]:
        """Keep a version for a sampler; if there are too many, release the one that was used longest ago.

        Return the ids of the samplers whose versions were released.
        """
        self._held[sampler] = ref
        gone: list[str] = []
        while len(self._held) > MOST_SNAPSHOTS:
            oldest, version = self._held.popitem(last=False)
            gone.append(oldest)
            await self._versions.release(version)
        return gone

    def get(self, sampler: str) -> AdapterRef:
        """Return the version of a sampler. Raises NotFound for one that is no longer kept."""
        ref = self._held.get(sampler)
        if ref is None:
            raise no_sampler(sampler)
        self._held.move_to_end(sampler)
        return ref

    async def close(self) -> None:
        """Release all of them."""
        held, self._held = self._held, OrderedDict()
        for ref in held.values():
            await self._versions.release(ref)


@dataclass(frozen=True)
class Base:
    """A sampler's source that is the base model."""


@dataclass(frozen=True)
class Saved:
    """A sampler's source that is a checkpoint, whose `path` is Tinker's."""

    path: str
    source: AdapterSource
    run: str


@dataclass(frozen=True)
class Snapshot:
    """A sampler's source that is an unnamed version."""


@dataclass(frozen=True)
class Inflight:
    """A sampler's source that is whatever its model published last for such samplers."""

    model: TrainedModel


Source = Base | Saved | Snapshot | Inflight


class Completion(NamedTuple):
    """A request that is done. `number` counts the completions of a sampler, and `clone` is the client that asked."""

    clone: int
    number: int
    request: str  # its id
    size: int | None  # bytes of its result; None: it has failed


class Sampler:
    """A sampling session: a source of tokens, and the requests to it, by their numbers."""

    def __init__(self, id: str, base_model: str, source: Source, content: bytes = b""):
        """Begin without requests. `content` is a digest of the request that made the sampler."""
        self.id = id
        self.base_model = base_model
        self.source = source
        self.content = content
        self.clients = 0  # numbers given to clients that joined
        self._seen: OrderedDict[int, tuple[bytes, Promise]] = OrderedDict()
        self._done: list[Completion] = []
        self._count = 0  # completions so far
        self._news = asyncio.Event()

    @property
    def path(self) -> str | None:
        """The path of the checkpoint that it samples from; None if it is none."""
        return self.source.path if isinstance(self.source, Saved) else None

    async def ref(self, versions: Versions, snapshots: Snapshots) -> AdapterRef | None:
        """Return the version that a new request runs under; None for the base. Raises NotFound and ModelError."""
        match self.source:
            case Base():
                return None
            case Saved(_, source, run):
                return await versions.read(source, run)
            case Snapshot():
                return snapshots.get(self.id)
            case Inflight(model):
                if model.inflight is None:
                    raise NotFound("the model of this sampler is gone", param="sampling_session_id")
                return model.inflight

    def repeated(self, number: int, content: bytes) -> Promise | None:
        """Return the promise of a request that has come before; None if it is new.

        `content` is a digest of the request. Raises InvalidRequest for a number that another request has used.
        """
        seen = self._seen.get(number)
        if seen is None:
            return None
        if seen[0] != content:
            raise InvalidRequest(f"seq_id {number} was used by another request", param="seq_id")
        return seen[1]

    def note(self, number: int, content: bytes, promise: Promise) -> None:
        """Remember a request."""
        self._seen[number] = (content, promise)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def done(self, number: int, promise: Promise) -> None:
        """Note that a request is done."""
        self._count += 1
        size = promise.size if isinstance(promise.outcome, Result) else None
        self._done.append(Completion(number // CLONE, self._count, promise.id, size))
        del self._done[:-REMEMBERED]
        self._news.set()

    def forget(self) -> None:
        """Forget the requests so far: they are not recognised when they are sent again, and not listed."""
        self._seen.clear()
        self._done.clear()

    async def completions(self, clone: int, after: int, seconds: float) -> Sequence[Completion]:
        """Return what is done of a client's requests after completion number `after`, and forget what came before.

        Waits until there is any, `seconds` at most.
        """
        found = self._after(clone, after)
        if not found and seconds > 0:
            self._news.clear()
            try:
                async with asyncio.timeout(seconds):
                    while not (found := self._after(clone, after)):
                        await self._news.wait()
                        self._news.clear()
            except TimeoutError:
                pass
        return found

    def _after(self, clone: int, after: int) -> Sequence[Completion]:
        self._done = [own for own in self._done if own.clone != clone or own.number > after]
        return [own for own in self._done if own.clone == clone]


class Memory:
    """The samplers that remember their requests: of all clients' samplers the REMEMBERING ones that were asked last."""

    def __init__(self) -> None:
        """Begin without samplers."""
        self._asked: OrderedDict[str, Sampler] = OrderedDict()

    def note(self, sampler: Sampler, number: int, content: bytes, promise: Promise) -> None:
        """Let a sampler remember a request, and let another one forget its own if too many remember any."""
        sampler.note(number, content, promise)
        self._asked[sampler.id] = sampler
        self._asked.move_to_end(sampler.id)
        while len(self._asked) > REMEMBERING:
            self._asked.popitem(last=False)[1].forget()

    def drop(self, id: str) -> None:
        """Take note that a sampler is gone."""
        self._asked.pop(id, None)
