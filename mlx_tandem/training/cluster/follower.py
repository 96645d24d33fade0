"""The follower: it serves what the leader serves, and sends the trajectories that it collects to the leader."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from msgspec import Struct, structs

from mlx_tandem.errors import EngineError, InvalidRequest, TandemError
from mlx_tandem.generation.front import Front
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.cluster.adopted import Adopted
from mlx_tandem.training.cluster.client import LeaderClient, Refused, Trouble, Unreachable
from mlx_tandem.training.cluster.fetching import fetch
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.joining import JOINED, Joined
from mlx_tandem.training.cluster.queue import Queue
from mlx_tandem.training.cluster.relay import Relay
from mlx_tandem.training.cluster.wire import MOST_ITEMS, Adapter, Feed, Item

WAIT = 10.0
"""Seconds for which the leader may hold a request for something new. A silent cut is noticed in about twice as long."""

RETRY = 0.3
"""Seconds between two attempts to reach the leader."""

REFUSED = 2.0
"""Seconds between two attempts at what the leader or this server has refused."""


class FollowerStatus(Struct):
    """Counts of a follower since its start."""

    role: str = "follower"
    leader: str = ""
    sequence: int = 0  # of the newest feed that is served
    adapters: int = 0  # from the leader
    waiting: int = 0  # trajectories for the leader
    sent: int = 0
    refused: int = 0  # trajectories that the leader has refused, which are gone
    dropped: int = 0  # trajectories, for lack of room
    error: str = ""  # of following; empty since it was overcome
    sending_error: str = ""


class Follower:
    """The follower's side of one server, on its event loop."""

    def __init__(self, front: Front):
        """Prepare to follow the leader that the settings name."""
        config = front.config
        self.folder = ClusterFolder(config.cluster.dir)
        self.queue = Queue(self.folder.path, config.rl_training.trajectory_buffer_size, lambda: self.folder.held)
        self.relay = Relay(front, self.queue)
        self._client = LeaderClient(config.cluster.connect_to, config.server.api_key)
        self._adopted = Adopted(front, self.folder)
        self._following, self._sending = Trouble(self._client.url), Trouble(self._client.url)
        self._status = FollowerStatus(leader=self._client.url)
        self._base = ""
        self._leader = ""  # the run of the leader whose feed was served last
        self._tasks: list[asyncio.Task[NoReturn]] = []

    async def bring_up(self) -> None:
        """Take the folder and serve what it has, then begin to follow. Later calls do nothing."""
        if self._tasks:
            return
        await asyncio.to_thread(self.folder.lock)
        joined = await asyncio.to_thread(self.folder.read, JOINED, Joined)
        assert joined is not None, "the command has written it"
        self._base = joined.base.sha256
        await self.queue.open()
        await self._adopted.restore()
        with contextlib.suppress(Unreachable, Refused, TandemError):
            await self._serve(await self._client.feed())  # so that the first request finds what the leader has
        self._tasks = [
            asyncio.create_task(again(self._follow, self._following)),
            asyncio.create_task(again(self._send, self._sending)),
        ]

    async def close(self) -> None:
        """End following; what was collected is sent after the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.relay.close()
        await self.queue.close()
        self.folder.close()

    def status(self) -> FollowerStatus:
        """Return the status for clients."""
        return structs.replace(
            self._status,
            adapters=len(self._adopted.adapters),
            waiting=self.queue.waiting,
            dropped=self.queue.dropped,
            error=self._following.error,
            sending_error=self._sending.error,
        )

    async def _follow(self) -> None:
        """Wait for the next feed, and serve what it has."""
        await self._serve(await self._client.feed(self._status.sequence, self._leader, WAIT))

    async def _serve(self, feed: Feed) -> None:
        """Serve the adapters of a feed, and no others of the leader. Raises Refused for what cannot be served; all
        others are served then.
        """
        if feed.base != self._base:
            raise Refused("the leader has another base model now: start this server again")
        if (feed.leader, feed.sequence) == (self._leader, self._status.sequence):
            return
        wrong = ""
        for adapter in feed.adapters:
            try:
                await self._take(adapter)
            except Refused as e:
                wrong = wrong or f"{adapter.name}: {e}"
        names = {adapter.name for adapter in feed.adapters}
        for adapter in self._adopted.adapters:
            if adapter.name not in names:
                await self._adopted.remove(adapter.name)
        if wrong:
            raise Refused(wrong)
        self._leader, self._status.sequence = feed.leader, feed.sequence

    async def _take(self, adapter: Adapter) -> None:
        if adapter in self._adopted.adapters:
            return
        await fetch(self._client, self.folder, adapter)
        try:
            await self._adopted.put(adapter)
        except EngineError:
            raise
        except InvalidRequest as e:
            raise Refused(e.message) from e

    async def _send(self) -> None:
        """Send the oldest trajectories that wait, or wait for some."""
        items = await self.queue.get(0, MOST_ITEMS, WAIT)
        if not items:
            return
        try:
            await self._client.send(self._base, self.queue.id, items)
            self._status.sent += len(items)
        except Refused as e:
            if e.status not in (400, 413):
                raise
            await self._send_each(items)
        await self.queue.remove(items[-1].number)

    async def _send_each(self, items: Sequence[Item]) -> None:
        """Send trajectories one by one, so that one that is refused does not hold up the others."""
        for item in items:
            try:
                await self._client.send(self._base, self.queue.id, [item])
                self._status.sent += 1
            except Refused as e:
                if e.status not in (400, 413):
                    raise
                self._status.refused += 1
                log("the leader has refused a trajectory", logging.WARNING, error=str(e))


async def again(turn: Callable[[], Awaitable[None]], trouble: Trouble) -> NoReturn:
    """Run `turn` for as long as the server does; what goes wrong is recorded and tried again."""
    while True:
        pause = REFUSED
        try:
            await turn()
            trouble.over()
            continue
        except Unreachable as e:
            pause = RETRY
            trouble.happened("the leader does not answer", str(e))
        except Refused as e:
            trouble.happened("the leader and this server do not agree", str(e))
        except TandemError as e:  # the engine is not there, or the drive takes nothing
            trouble.happened("following the leader has to wait", e.message)
        except Exception as e:
            log_exception("following the leader failed", e)
            trouble.error = f"internal error: {type(e).__name__}"
        await asyncio.sleep(pause)
