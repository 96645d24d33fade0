"""The trainer's side: it learns from the trajectories that a leader has, and publishes its versions there."""

from __future__ import annotations

import asyncio
import logging
from itertools import groupby
from pathlib import Path
from typing import NoReturn

from msgspec import Struct, structs

from mlx_tandem import files
from mlx_tandem.adapters.formats import WEIGHTS
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.generation.front import Front
from mlx_tandem.log import log
from mlx_tandem.training.cluster.adopted import load
from mlx_tandem.training.cluster.checks import check_items
from mlx_tandem.training.cluster.client import LeaderClient, Refused, Trouble
from mlx_tandem.training.cluster.fetching import fetch
from mlx_tandem.training.cluster.folder import ClusterFolder, describe
from mlx_tandem.training.cluster.follower import WAIT, again
from mlx_tandem.training.cluster.joining import JOINED, Joined
from mlx_tandem.training.cluster.wire import (
    CHUNK,
    MOST_ITEMS,
    Adapter,
    Contribution,
    Feed,
    File,
    Item,
    Publication,
    Version,
)
from mlx_tandem.training.live.learning import Learning
from mlx_tandem.training.store.records import GOOD
from mlx_tandem.types import AdapterRef

REST = 1.0
"""Seconds between two requests, which keep the lease, while the next update needs no more trajectories."""

KEPT = 4
"""Versions whose files are kept, so that the leader can be told to go back to them."""


class TrainerStatus(Struct):
    """Counts of a distant trainer since its start."""

    role: str = "trainer"
    leader: str = ""
    trajectories: int = 0  # from the leader
    refused: int = 0  # trajectories that could not be from this base
    published: int = 0  # versions
    version: int = 0  # of this trainer's, the one that the leader serves; 0: none yet
    error: str = ""  # of taking trajectories; empty since it was overcome
    publishing_error: str = ""


class Trainer:
    """The trainer's side of one server that learns, on its event loop. `join` comes before its adapters are loaded,
    `count` before its learner is brought up, and `bring_up` afterwards.
    """

    def __init__(self, front: Front, learning: Learning):
        """Prepare to work for the leader that the settings name."""
        config = front.config
        self.folder = ClusterFolder(config.cluster.dir)
        self._front, self._learning = front, learning
        self._client = LeaderClient(config.cluster.connect_to, config.server.api_key)
        self._name = config.rl_training.adapter
        self._taking, self._publishing = Trouble(self._client.url), Trouble(self._client.url)
        self._status = TrainerStatus(leader=self._client.url)
        self._id = self._base = self._queue = ""
        self._begun_with = ""  # digest of the version that this server began with, whose folder is read at each start
        self._newest = 0  # highest number that the leader had when this server joined it
        self._after = 0  # number of the last trajectory that the learner has
        self._leader = ""  # run of the leader
        self._handed_in = -1  # the leader's version from which the last contribution was learned
        self._began = 0  # number of updates when the round began
        self._exported: dict[str, Version] = {}  # by digest, oldest first
        self._tasks: list[asyncio.Task[NoReturn]] = []

    async def join(self) -> None:
        """Take the folder, and give the version that this server begins with the number that it has on the leader."""
        if self._base:
            return
        await asyncio.to_thread(self.folder.lock)
        joined = await asyncio.to_thread(self.folder.read, JOINED, Joined)
        assert joined is not None, "the command has written it"
        self._id, self._base = joined.id, joined.base.sha256
        self._queue = "0" * 16  # of no leader
        self._newest = joined.newest
        if joined.beginning is not None:
            self._begun_with = joined.beginning.digest
            self._learning.count_from(joined.beginning.number - 1)

    def count(self) -> None:
        """Give new versions numbers above those that the leader has."""
        self._learning.count_from(self._newest)

    async def bring_up(self) -> None:
        """Begin to take trajectories and to publish. Later calls do nothing."""
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(again(self._take, self._taking)),
                asyncio.create_task(again(self._publish, self._publishing)),
            ]

    async def close(self) -> None:
        """End both tasks. The leader keeps the trajectories that were not taken."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.folder.close()

    def status(self) -> TrainerStatus:
        """Return the status for clients."""
        return structs.replace(self._status, error=self._taking.error, publishing_error=self._publishing.error)

    # -- trajectories -----------------------------------------------------------------------------------------------

    async def _take(self) -> None:
        """Take as many trajectories as the next update still needs. The next request acknowledges them."""
        lacking = self._learning.learner.lacking()
        most = max(0, min(lacking or 0, MOST_ITEMS))
        found = await self._client.take(self._id, self._queue, self._after, most, WAIT if most else 0.0)
        if found.base != self._base:
            raise Refused("the leader has another base model now: start this server again")
        if found.queue != self._queue:
            self._queue, self._after = found.queue, 0
        await self._keep(found.items)
        if found.items:
            self._after = found.items[-1].number
        elif not most:
            await asyncio.sleep(REST)

    async def _keep(self, items: tuple[Item, ...]) -> None:
        """Give trajectories to the learner, which has them on the drive when this returns."""
        info = self._front.client.check_ready()
        good = []
        for item in items:
            try:
                check_items([item], vocab_size=info.vocab_size, most_tokens=info.max_model_len)
                good.append(item)
            except InvalidRequest as e:
                self._status.refused += 1
                log("a trajectory of the leader is not learned from", logging.WARNING, reason=e.message)
        for size, same in groupby(good, key=lambda item: item.size):
            await self._learning.learner.add([item.trajectory for item in same], size)
        self._status.trajectories += len(good)

    # -- versions ---------------------------------------------------------------------------------------------------

    async def _publish(self) -> None:
        """Have the leader serve the version of the trained adapter that is served here, then wait until one may change.

        Where several trainers learn, take part in rounds instead.
        """
        self._learning.published.clear()
        feed = await self._client.feed()
        there = next((adapter for adapter in feed.adapters if adapter.name == self._name), None)
        if self._learning.learner.status().recovering:  # this server serves an earlier version until then
            await self._news(feed)
            return
        if feed.trainers > 1:
            if feed.leader != self._leader:  # a leader that was started again has no contributions
                self._leader, self._handed_in = feed.leader, -1
            await self._round(there)
        elif (version := await self._version(self._learning.current())) is not None:
            await self._show(version, there)
        await self._news(feed)

    async def _news(self, feed: Feed) -> None:
        """Wait until this server or the leader, whose last feed is given, serves something else, but not for long."""
        here = asyncio.create_task(self._learning.published.wait())
        there = asyncio.create_task(self._client.feed(feed.sequence, feed.leader, WAIT))
        try:
            await asyncio.wait((here, there), return_when=asyncio.FIRST_COMPLETED)
            if there.done():
                there.result()
        finally:
            for task in (here, there):
                task.cancel()
            await asyncio.gather(here, there, return_exceptions=True)

    async def _version(self, ref: AdapterRef | None) -> Version | None:
        """Return a version with its files, which are written now if need be; None if the trainer has moved on."""
        if ref is None:
            return None
        known = self._exported.get(ref.digest)
        if known is not None and known.number == ref.version and self.folder.source(ref.digest) is not None:
            return known
        source = await asyncio.to_thread(self.folder.source, ref.digest)
        if source is None:
            new = await asyncio.to_thread(self.folder.new, ref.digest)
            if not await self._learning.learner.export(ref.digest, str(new)):
                return None
            source = await asyncio.to_thread(self.folder.commit, ref.digest)
        shown = await asyncio.to_thread(describe, Path(source.path))
        self._exported[ref.digest] = version = Version(ref.version, ref.digest, shown)
        while len(self._exported) > KEPT:
            oldest = next(iter(self._exported))
            del self._exported[oldest]
            if oldest != self._begun_with:
                await asyncio.to_thread(self.folder.remove, oldest)
        return version

    async def _show(self, version: Version, there: Adapter | None) -> None:
        """Have the leader serve a version unless it already does. `there` is the adapter as the leader serves it."""
        known = there is not None and version in there.versions
        if there is None or not known or there.current != version.number:
            if not known:
                await self._upload(version)
            await self._client.publish(Publication(self._id, self._base, self._name, version))
            self._status.published += 1
            log("published to the leader", adapter=f"{self._name}@{version.number}", digest=version.digest)
        self._status.version = version.number

    async def _round(self, there: Adapter | None) -> None:
        """Take part in a round: begin with the version that the leader serves, learn, and hand in what was learned."""
        if there is not None and there.current != self._status.version:
            await self._begin_round(there)
        elif self._handed_in != self._status.version or there is None:
            updates = self._learning.learner.status().updates - self._began
            if there is not None and updates < self._front.config.cluster.round_updates:
                return
            self._learning.learner.stop()
            reports = list(self._learning.learner.history)[-updates:] if updates else []
            examples = sum(report.trajectories for report in reports if report.outcome in GOOD)
            version = await self._version(self._learning.current())
            if version is not None and (examples or there is None):
                await self._upload(version)
                given = (self._id, self._base, self._name, version, self._status.version, examples)
                await self._client.contribute(Contribution(*given))
                self._handed_in = self._status.version
                self._status.published += 1
            else:  # all of these updates were taken back
                self._began += updates
                self._learning.learner.start()

    async def _begin_round(self, there: Adapter) -> None:
        """Go on from the version that the leader serves, and learn."""
        version = next(version for version in there.versions if version.number == there.current)
        await fetch(self._client, self.folder, structs.replace(there, versions=(version,)))
        await load(self._front, self.folder, version)
        await self._front.models.elsewhere.let_go(version.digest)
        weights = self.folder.version(version.digest) / WEIGHTS["peft"]

        async def write(folder: str) -> None:
            await asyncio.to_thread(files.replace, Path(folder) / WEIGHTS["peft"], weights.read_bytes())

        await self._learning.learner.adopt(version.number, write)
        self._status.version, self._began = version.number, self._learning.learner.status().updates
        self._learning.learner.start()
        log("round begins", adapter=f"{self._name}@{version.number}")

    async def _upload(self, version: Version) -> None:
        """Send those bytes of a version's files that the leader does not have."""
        for file in version.files:
            await self._upload_file(self.folder.version(version.digest) / file.name, file)

    async def _upload_file(self, path: Path, file: File) -> None:
        there = await self._client.upload(self._id, file, 0, b"")
        while there < file.size:
            content = await asyncio.to_thread(_read, path, there)
            now = await self._client.upload(self._id, file, there, content)
            if now <= there:
                raise Refused(f"the leader takes no bytes of {file.name} after {there}")
            there = now


def _read(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)
    except OSError as e:
        raise TandemError(f"{path} cannot be read: {e.strerror}") from e
