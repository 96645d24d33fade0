"""A supervised engine that is unloaded while nobody uses it, and that calls to it wake."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from mlx_tandem.engine.client.calls import Calls
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.supervisor import WHY_NOT, State, Supervisor
from mlx_tandem.engine.messages import Inbound, Report
from mlx_tandem.errors import EngineUnavailable, TandemError
from mlx_tandem.types import EngineInfo

ACCEPTING = frozenset[State]({"ready", "idle", "waking"})
"""The states in which requests are accepted."""

REPORT_SECONDS = 1.0
"""Seconds to wait for the engine's report before its last one is used."""


class WakeableEngine(Supervisor):
    """A supervised engine that calls wake, with the open calls and the tasks that wait until it is ready."""

    def __init__(self, launch: Launch, **options: Any):
        """Begin without a process. `options` are those of `Supervisor`."""
        super().__init__(launch, **options)
        self._ids = itertools.count(1)
        self._calls = Calls()
        self._sleepers: set[asyncio.Future[None]] = set()  # of tasks that wait until the engine is ready
        self._users = 0  # blocks of `in_use`
        self._used_at = time.monotonic()

    def next_ids(self, count: int) -> range:
        """Return `count` consecutive request ids that nobody has used, for one stream."""
        first = next(self._ids)
        for _ in range(count - 1):
            next(self._ids)
        return range(first, first + count)

    def check_ready(self) -> EngineInfo:
        """Return the description of the engine. Raises EngineUnavailable unless requests are accepted now.

        An engine that is idle is described as it was; requests that come now wake it and wait for it.
        """
        if self.state not in ACCEPTING or self.info is None:
            raise EngineUnavailable(WHY_NOT[self.state])
        return self.info

    @property
    def is_used(self) -> bool:
        """Whether anybody uses the engine or waits for it. Reports are no use of it."""
        return bool(self._users or self._sleepers)

    @property
    def unused_seconds(self) -> float:
        """Seconds since the engine was used last; 0 while it is used."""
        return 0.0 if self.is_used else time.monotonic() - self._used_at

    def unload(self) -> bool:
        """Begin to end the engine's process until it is needed, and return True; False if it is used or not ready."""
        return not self.is_used and super().unload()

    @contextlib.asynccontextmanager
    async def in_use(self, *, wakes: bool = True) -> AsyncIterator[None]:
        """Wake the engine if it is idle, unless `wakes` is false, and keep it from being unloaded during the block.

        Raises the error that keeps it from being woken.
        """
        self._users += 1
        try:
            if wakes and self.state in ("idle", "waking"):
                self.wake()
                future = asyncio.get_running_loop().create_future()
                self._sleepers.add(future)
                try:
                    await future
                finally:
                    self._sleepers.discard(future)
            yield
        finally:
            self._users -= 1
            self._used_at = time.monotonic()

    async def refresh(self) -> None:
        """Update `stats` and `occupancy`, so that they include everything that the engine has done and was sent before.

        They stay as they are if there is no engine, or if the engine does not reply within REPORT_SECONDS, for example
        during a long step.
        """
        if self.has_engine and self.state != "idle":
            with contextlib.suppress(TandemError, TimeoutError):
                await asyncio.wait_for(self._answer(Report), REPORT_SECONDS)

    async def _call(self, message: Callable[[int], Inbound]) -> Any:
        """Send a message that has one answer, and return the answer. Raises the error that the engine reports.

        An idle engine is woken. Whoever sets a new engine up calls it before it is ready.
        """
        async with self.in_use(wakes=not self.has_engine or self.state == "idle"):
            return await self._answer(message)

    async def _answer(self, message: Callable[[int], Inbound]) -> Any:
        """Send a message to the engine that runs, and return its answer."""
        if self._link is None or not self.has_engine:
            raise EngineUnavailable(WHY_NOT[self.state])
        call = next(self._ids)
        with self._calls.open(call) as answer:
            self._link.send(message(call))
            return await answer

    # -- the engine's life --------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let whoever has waited for the engine go on, as it is ready now."""
        for future in self._sleepers:
            if not future.done():
                future.set_result(None)

    def _fail_sent(self, error: TandemError) -> None:
        """End the calls that an engine has got."""
        self._calls.fail(error)

    def _fail_all(self, error: TandemError) -> None:
        """End all calls, and the waiting of whoever waits for the engine, with an error."""
        self._fail_sent(error)
        for future in self._sleepers:
            if not future.done():
                future.set_exception(error)
