"""Rounds of federated averaging: each trainer hands in what it has learned from the version that is served."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path

from mlx_tandem.errors import Conflict, TandemError
from mlx_tandem.log import log, log_exception
from mlx_tandem.training.cluster.averaging import average
from mlx_tandem.training.cluster.folder import ClusterFolder
from mlx_tandem.training.cluster.wire import Contribution

Serve = Callable[[Path, int], Awaitable[None]]
"""A function that serves the adapter in a folder, which it may move, under a number."""


class Rounds:
    """The round of one leader. It ends with the contribution of the last trainer, or when the time is over."""

    def __init__(self, folder: ClusterFolder, trainers: int, seconds: float, serve: Serve):
        """Prepare for `trainers` trainers. `serve` serves their average, at most `seconds` after the first one."""
        self._folder, self._trainers, self._seconds, self._serve = folder, trainers, seconds, serve
        self._given: dict[str, Contribution] = {}  # by trainer
        self._timer: asyncio.Task[None] | None = None
        self._ending = asyncio.Lock()
        self.done = 0
        """Rounds that have ended since the start."""
        self.stale = 0
        """Contributions that were dropped since the start, because they were learned from an earlier version."""

    @property
    def waiting(self) -> int:
        """How many trainers have handed in what they have learned in this round."""
        return len(self._given)

    async def add(self, given: Contribution, current: int) -> None:
        """Take a contribution, whose content is in the folder, in place of an earlier one of its trainer.

        Raises Conflict for one that was not learned from version `current`.
        """
        async with self._ending:
            self.check(given, current)
            self._given[given.trainer] = given
            if len(self._given) >= self._trainers:
                await self._end(current)
            elif self._timer is None:
                self._timer = asyncio.create_task(self._time(current))

    def check(self, given: Contribution, current: int) -> None:
        """Raise Conflict for a contribution that was not learned from version `current`, and count it."""
        if given.begun != current:
            self.stale += 1
            raise Conflict(f"version {current} is served now: learn from that", param="begun")

    async def close(self) -> None:
        """Give up the round: the trainers will hand in their contributions again."""
        self._stop_timer()

    async def _time(self, current: int) -> None:
        await asyncio.sleep(self._seconds)
        self._timer = None
        try:
            async with self._ending:
                if self._given:
                    await self._end(current)
        except Exception as e:
            log_exception("a round has failed", e)

    async def _end(self, current: int) -> None:
        """Serve the average of all contributions as the next version."""
        self._stop_timer()
        given, self._given = list(self._given.values()), {}
        target = self._folder.path / "versions" / f".new-{secrets.token_hex(8)}"
        number = 1 + max(current, *(each.version.number for each in given))
        folders = [self._folder.version(each.version.digest) for each in given]
        try:
            await asyncio.to_thread(target.mkdir)
            await asyncio.to_thread(average, folders, [each.examples for each in given], target)
            await self._serve(target, number)
            self.done += 1
            log("round ended", version=number, trainers=len(given), examples=sum(each.examples for each in given))
        except Exception as e:
            # What was acknowledged is not lost: the round is tried again, with what is handed in until then.
            self._given = {each.trainer: each for each in given}
            self._timer = asyncio.create_task(self._time(current))
            log("a round has failed", logging.WARNING, reason=e.message if isinstance(e, TandemError) else repr(e))
            raise

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
