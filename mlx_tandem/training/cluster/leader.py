"""The leader: it shows its adapters to other machines, takes versions from a trainer, and passes trajectories on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from mlx_tandem.adapters.registry import Entry
from mlx_tandem.errors import Conflict, EngineUnavailable, InvalidRequest, ModelError, Overloaded
from mlx_tandem.generation.front import Front
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.cluster import bases
from mlx_tandem.training.cluster.adopted import KEPT, Adopted, load, with_version
from mlx_tandem.training.cluster.checks import check_items
from mlx_tandem.training.cluster.folder import ClusterFolder, describe
from mlx_tandem.training.cluster.queue import Queue
from mlx_tandem.training.cluster.relay import Relay
from mlx_tandem.training.cluster.rounds import Rounds
from mlx_tandem.training.cluster.shared_files import SharedFiles
from mlx_tandem.training.cluster.wire import (
    MOST_WAIT,
    Adapter,
    Base,
    Contribution,
    Feed,
    File,
    Item,
    Items,
    Publication,
    Version,
)
from mlx_tandem.types import AdapterSource

LEASE = 15.0
"""Seconds after its last request for which a trainer keeps its lease."""

BASE_SECONDS = 5.0
"""Seconds that a request waits for the digest of the base, for which a start reads all files of the base."""

MOST_WAITING = 256
"""Most requests that wait for something new."""


class LeaderStatus(Struct):
    """Counts of a leader since its start."""

    role: str = "leader"
    base: str = ""
    sequence: int = 0  # of the newest feed
    adapters: int = 0  # that are shown
    waiting: int = 0  # trajectories for the trainer
    received: int = 0  # trajectories from followers
    dropped: int = 0  # trajectories, for lack of room
    published: int = 0  # versions from the trainer
    trainers: tuple[str, ...] = ()  # that are connected now
    contributions: int = 0  # to this round of federated averaging
    rounds: int = 0
    stale: int = 0  # contributions from earlier versions, which were dropped


class Leader:
    """The leader's side of one server, on its event loop. `bring_up` comes whenever an engine is ready."""

    def __init__(self, front: Front):
        """Prepare to lead."""
        config = front.config
        self._front = front
        self.folder = ClusterFolder(config.cluster.dir)
        self.queue = Queue(self.folder.path, config.rl_training.trajectory_buffer_size, lambda: self.folder.held)
        self.relay = Relay(front, self.queue)
        self.files = SharedFiles()
        self._adopted = Adopted(front, self.folder)
        self._name = config.rl_training.adapter
        self._run = secrets.token_hex(8)
        self._base: asyncio.Task[str] | None = None  # which computes the digest of the base
        self._known = ""  # that digest, once somebody has asked for it
        self._adapters: tuple[Adapter, ...] = ()
        self._described: dict[str, tuple[File, ...]] = {}  # by digest
        self._sequence = 0
        self._changed, self._told = asyncio.Event(), asyncio.Condition()
        self._watching: asyncio.Task[None] | None = None
        self._waiting = 0
        self._leases: dict[str, float] = {}  # monotonic time of their ends, by trainer
        self._active: frozenset[str] = frozenset()  # trainers that had a lease when `_free` was called last
        self._started = time.monotonic()
        cluster = config.cluster
        self._rounds = Rounds(self.folder, cluster.trainers, cluster.round_s, self._serve_average)
        self._receiving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by trainer, for its files
        self._publishing = asyncio.Lock()
        self._received = self._published = 0
        self._closed = False

    # -- life -------------------------------------------------------------------------------------------------------

    async def bring_up(self) -> None:
        """Take the folder and serve what it has, on a server whose own adapters are loaded. Later calls do nothing."""
        if self._watching is not None:
            return
        await asyncio.to_thread(self.folder.lock)
        await self.queue.open()
        await self._adopted.restore()
        self._front.models.registry.on_change = self._changed.set
        self._base = asyncio.create_task(asyncio.to_thread(bases.digest, Path(self._front.config.engine.model.path)))
        await self._refresh()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End all tasks and let nobody wait any longer."""
        self._closed = True
        tasks = [task for task in (self._watching, self._base) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._told:
            self._told.notify_all()
        await self._rounds.close()
        await self.relay.close()
        await self.queue.close()
        self.folder.close()

    # -- what is shown ----------------------------------------------------------------------------------------------

    async def base(self) -> Base:
        """Return the base model, whose digest is computed once. Raises EngineUnavailable until it is."""
        models = self._front.models
        folder = Path(self._front.config.engine.model.path)
        hub = next((name for name in self._front.config.server.served_model_names if "/" in name), "")
        names = (models.id, *models.served_names)
        return Base(await self._digest(), folder.resolve().name, hub, names, self._name)

    async def _digest(self) -> str:
        if self._base is None or self._closed:
            raise EngineUnavailable("the server is not ready to lead")
        try:
            self._known = await asyncio.wait_for(asyncio.shield(self._base), BASE_SECONDS)
        except TimeoutError:
            raise EngineUnavailable("the leader still reads the files of its base model") from None
        return self._known

    async def feed(self, after: int, leader: str, wait: float) -> Feed:
        """Return the adapters once they are newer than `after`, or after `wait` seconds. Raises Overloaded.

        The numbers of another run of the leader mean nothing: its callers get the adapters at once.
        """
        base = await self._digest()
        if leader == self._run and after >= self._sequence:
            with self._one_more(), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait, MOST_WAIT)), self._told:
                    await self._told.wait_for(lambda: self._sequence > after or self._closed)
        trainers = self._front.config.cluster.trainers
        return Feed(self._run, self._sequence, base, self._adapters, trainers)

    @contextlib.contextmanager
    def _one_more(self) -> Iterator[None]:
        """Count a request that waits. Raises Overloaded if too many do."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} machines wait already", retry_after=5.0)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        """Bring the feed in line with the registry whenever that changes."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._refresh()
            except Exception as e:
                log_exception("the feed could not be renewed", e)

    async def _refresh(self) -> None:
        registry = self._front.models.registry
        found = []
        for current in registry.entries():
            shown = [e for e in registry.versions(current.name) if e.source is not None][-KEPT:]
            shown = shown if current in shown or current.source is None else [current, *shown[1:]]
            versions = tuple([v for e in shown if (v := await self._described_version(e)) is not None])
            if any(v.number == current.ref.version for v in versions):
                found.append(Adapter(current.name, current.ref.version, versions))
        if tuple(found) == self._adapters:
            return
        self._adapters = tuple(found)
        self._sequence += 1
        needed = {version.digest for adapter in found for version in adapter.versions}
        self._described = {digest: files for digest, files in self._described.items() if digest in needed}
        self.files.keep({file.sha256 for files in self._described.values() for file in files})
        async with self._told:
            self._told.notify_all()

    async def _described_version(self, entry: Entry) -> Version | None:
        """Return a version with its files; None if they cannot be read."""
        digest = entry.ref.digest
        if digest not in self._described:
            assert entry.source is not None
            try:
                self._described[digest] = await asyncio.to_thread(self.files.describe, entry.source)
            except InvalidRequest as e:
                log("a version is not shared", logging.WARNING, adapter=entry.ref.label, reason=e.message)
                return None
        return Version(entry.ref.version, digest, self._described[digest])

    # -- the trainer ------------------------------------------------------------------------------------------------

    def _hold(self, trainer: str) -> None:
        """Give or renew the lease of a trainer. Raises Conflict while as many others as there may be have theirs."""
        now = time.monotonic()
        self._leases = {other: end for other, end in self._leases.items() if end > now or other == trainer}
        if trainer not in self._leases:
            if len(self._leases) >= self._front.config.cluster.trainers:
                raise Conflict("another trainer is connected to this leader", param="trainer")
            log("a trainer is connected", trainer=trainer)
            for other in self._receiving.keys() - self._leases.keys():
                if not self._receiving[other].locked():
                    del self._receiving[other]
        self._leases[trainer] = now + LEASE

    async def receive(self, trainer: str, file: File, offset: int, content: bytes) -> int:
        """Take bytes of a file that a trainer publishes next; return how many there are of it from this trainer.

        Raises InvalidRequest, and Conflict while as many other trainers as there may be are connected.
        """
        self._hold(trainer)
        most = self._front.config.cluster.trainers
        async with self._receiving[trainer]:
            await asyncio.to_thread(self.folder.bound_senders, most, frozenset(self._leases))
            return await asyncio.to_thread(self.folder.append, file, offset, content, trainer)

    async def publish(self, wanted: Publication) -> None:
        """Serve a version whose files are there. Raises InvalidRequest if it is not what it says; nothing changes then.

        Publishing the same version again, as a trainer does that has not received the reply, changes nothing.
        """
        if self._front.config.cluster.trainers > 1:
            raise InvalidRequest("this leader averages what trainers contribute (--federate)", param="version")
        await self._check(wanted)
        async with self._publishing:
            self._adopted.check(self._name, wanted.version)
            await self._have(wanted)
            try:
                await self._adopted.put(with_version(self._adopted.get(self._name), self._name, wanted.version))
            except InvalidRequest as e:
                if isinstance(e, ModelError):
                    log("a version from the trainer is refused", logging.WARNING, reason=e.message)
                raise
            self._published += 1

    async def contribute(self, given: Contribution) -> None:
        """Take what a trainer has learned in a round of averaging. The very first version is served as it is.

        Raises Conflict for what was learned from an earlier version, and InvalidRequest if it is not what it says.
        """
        await self._check(given)
        async with self._publishing:
            current = self._adopted.get(self._name)
            if current is not None and given.begun == current.current and not given.examples:
                raise InvalidRequest("nothing was learned", param="examples")
            if current is None:
                self._adopted.check(self._name, given.version)
            else:
                self._rounds.check(given, current.current)
            await self._have(given)
            if current is None:
                await self._adopted.put(with_version(None, self._name, given.version))
                return
            await load(self._front, self.folder, given.version)
            await self._front.models.elsewhere.let_go(given.version.digest)
            await self._rounds.add(given, current.current)

    async def _check(self, wanted: Publication | Contribution) -> None:
        """Raise InvalidRequest unless a trainer may hand in this version."""
        if wanted.base != await self._digest():
            raise Conflict("the version was trained on another base model", param="base")
        if wanted.adapter != self._name:
            raise InvalidRequest(f"the adapter that is trained here is {self._name}", param="adapter")
        self._hold(wanted.trainer)

    async def _have(self, wanted: Publication | Contribution) -> None:
        """Make the folder of a version from its trainer's files, unless it is there. Raises InvalidRequest."""
        async with self._receiving[wanted.trainer]:
            if self.folder.source(wanted.version.digest) is None:
                await asyncio.to_thread(self.folder.assemble, wanted.version, wanted.trainer)

    async def _serve_average(self, path: Path, number: int) -> None:
        """Serve the adapter in a new folder as the current version, and remove what it was made of."""
        info = await self._front.client.load_adapter(AdapterSource(str(path), str(self.folder.path)))
        await asyncio.to_thread(self.folder.take_in, path, info.digest)
        version = Version(number, info.digest, await asyncio.to_thread(describe, self.folder.version(info.digest)))
        await self._adopted.put(with_version(self._adopted.get(self._name), self._name, version))
        self._published += 1

    async def take(self, trainer: str, queue: str, after: int, most: int, wait: float) -> Items:
        """Return trajectories with numbers above `after` in the queue `queue`; the trainer has those up to there.

        Raises Conflict while another trainer has the lease, StorageError, and Overloaded.
        """
        base = await self._digest()
        self._hold(trainer)
        if queue == self.queue.id:
            await self.queue.remove(after, trainer)
        else:
            after = 0
        await self._free()
        with self._one_more():
            found = await self.queue.get(after, most, min(wait, MOST_WAIT), trainer)
        self._hold(trainer)
        return Items(base, self.queue.id, found)

    async def _free(self) -> None:
        """Let other trainers have what those whose leases have ended did not acknowledge."""
        active = frozenset(self._leases)
        if active != self._active and time.monotonic() > self._started + LEASE:
            await self.queue.free(active)
            self._active = active

    # -- followers --------------------------------------------------------------------------------------------------

    async def collect(self, sent: Items) -> int:
        """Take trajectories from a follower, which are on the drive when this returns; return how many.

        Raises InvalidRequest for one that cannot be from this base; none is taken then.
        """
        if sent.base != await self._digest():
            raise Conflict("the trajectories are of another base model", param="base")
        info = self._front.client.check_ready()
        await asyncio.to_thread(check_items, sent.items, vocab_size=info.vocab_size, most_tokens=info.max_model_len)
        await self.queue.put([Item(item.trajectory, item.size) for item in sent.items])
        self._received += len(sent.items)
        return len(sent.items)

    def status(self) -> LeaderStatus:
        """Return the status for clients."""
        now = time.monotonic()
        return LeaderStatus(
            base=self._known,
            sequence=self._sequence,
            adapters=len(self._adapters),
            waiting=self.queue.waiting,
            received=self._received,
            dropped=self.queue.dropped,
            published=self._published,
            trainers=tuple(sorted(trainer for trainer, end in self._leases.items() if end > now)),
            contributions=self._rounds.waiting,
            rounds=self._rounds.done,
            stale=self._rounds.stale,
        )
