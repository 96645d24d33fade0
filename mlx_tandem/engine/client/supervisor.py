"""The supervision of the engine: its process is launched, watched, and launched again when it dies or is needed."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal

from mlx_tandem.engine.client import counters
from mlx_tandem.engine.client.ending import explain_end
from mlx_tandem.engine.client.link import Link
from mlx_tandem.engine.client.process import EngineProcess, Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartClock, StartProgress
from mlx_tandem.engine.messages import Drain, Fatal, Heartbeat, Note, Occupancy, Progress, Ready
from mlx_tandem.errors import EngineDied, EngineError, EngineUnavailable, ModelError, TandemError
from mlx_tandem.types import EngineInfo, EngineStats

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "idle", "waking", "restarting", "draining", "dead"]
"""The state of the engine. While it is `idle` there is no process, and the next request wakes it: requests are accepted
while it is `ready`, `idle` or `waking`."""

MAX_DEATHS = 3
"""Number of deaths within DEATH_WINDOW seconds after which the engine is given up. When an engine that had become ready
dies, the count begins anew."""

DEATH_WINDOW = 60.0
"""Seconds over which deaths are counted."""

WATCH_SECONDS = 0.25
"""Seconds between two looks at the process and its connection."""

UNLOAD_SECONDS = 1.5
"""Seconds that an engine has to end when it is unloaded; then it is killed."""

KILL_SECONDS = 5.0
"""Seconds to wait for the end of a process that has hung up, or that was killed."""

WHY_NOT: dict[State, str] = {
    "starting": "the model is still loading",
    "ready": "the engine is not ready",
    "idle": "the engine is unloaded",
    "waking": "the engine is not ready",
    "restarting": "the engine is restarting",
    "draining": "the server is shutting down",
    "dead": "the engine cannot be started",
}
"""Why requests are not accepted in each state."""


class Supervisor(ABC):
    """The lifetime of the engine, with what it has last said about itself, on one event loop.

    `on_ready` runs each time an engine has sent Ready, before requests are accepted; it may call `load_adapter`. An
    error that it raises on the first start is final, as a model that cannot be loaded is. `on_progress` is called with
    each message about the progress of a start, and every WATCH_SECONDS. `times` are those of the last start.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        stall_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
        on_ready: Callable[[], Awaitable[None]] | None = None,
        on_progress: Callable[[StartProgress], None] | None = None,
        times: KeptTimes | None = None,
    ):
        self._launch = launch
        self._stall_seconds = stall_seconds
        self._backoff_seconds = backoff_seconds
        self._on_ready = on_ready
        self._on_progress = on_progress
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        """The description of the running engine; of the last one while it is idle or wakes up; None without one."""
        self.has_engine = False
        """Whether an engine runs that has sent Ready."""
        self.stats = EngineStats()  # its counters go on over all engines of this process
        self._stats_before = EngineStats()  # the counters of the engines that have ended
        self.occupancy = Occupancy()  # sent more often than the stats
        self._clock = StartClock(times)
        self.failure: TandemError | None = None  # the error behind the state "dead"
        self.restarts = 0  # after deaths; engines that are unloaded and woken do not count
        self.epoch = 0
        """A number that identifies the engine: what was opened in an engine of another epoch is gone with it."""
        self.unloads = 0  # how often the engine was unloaded
        self._woken = asyncio.Event()  # somebody needs the engine that is idle
        self._link: Link | None = None
        self._fatal: TandemError | None = None
        self._settled = asyncio.Event()  # ready for the first time, or dead
        self._dead = asyncio.Event()
        self._was_ready = False
        self._supervisor: asyncio.Task[None] | None = None
        self._is_cancelled = False

    @property
    def progress(self) -> StartProgress:
        """The progress of the present start."""
        return self._clock.progress()

    # -- start and end ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to launch and supervise the engine, and return at once."""
        self._supervisor = asyncio.create_task(self._supervise())

    async def wait_ready(self) -> None:
        """Wait until requests are accepted. Raises the error that ended the engine when it cannot be started."""
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure

    async def wait_dead(self) -> None:
        """Wait until the engine cannot be kept alive, and raise the error; never return."""
        await self._dead.wait()
        assert self.failure is not None
        raise self.failure

    def begin_drain(self) -> None:
        """Accept no more requests; running ones continue, and those that wait for an idle engine end with an error."""
        sleeps = self.state in ("idle", "waking")
        if self.state != "dead":
            self.state = "draining"
        if sleeps:
            self._fail_all(EngineUnavailable("the server is shutting down"))

    async def drain(self, timeout: float) -> bool:
        """Let the engine finish its requests for up to `timeout` seconds and end it; return False when some were cut
        off.
        """
        self.begin_drain()
        finished = True
        if self._link is not None and self._supervisor is not None:
            self._link.send(Drain())
            done, _ = await asyncio.wait({self._supervisor}, timeout=timeout)
            finished = bool(done)
        await self.close()
        return finished

    async def close(self) -> None:
        """End the engine now. Open streams end with EngineUnavailable."""
        self.begin_drain()
        self._fail_all(EngineUnavailable("the server is shutting down"))
        if self._supervisor is not None:
            # A second time would prevent the kill of an engine that hangs. `cancelling` does not say whether there was
            # a first: for a moment it counts the end of a timeout, too.
            if not self._is_cancelled:
                self._is_cancelled = True
                self._supervisor.cancel()
            await asyncio.wait({self._supervisor})

    def unload(self) -> bool:
        """Begin to end the engine's process until `wake`, and return True; False while it is not ready.

        The caller has made sure that nobody uses the engine.
        """
        if self.state != "ready" or self._link is None:
            return False
        self.state = "idle"
        self.epoch += 1
        self.unloads += 1
        self._woken.clear()
        self._link.send(Drain())
        asyncio.get_running_loop().call_later(UNLOAD_SECONDS, self._link.close)
        log.info("engine unloaded")
        return True

    def wake(self) -> None:
        """Launch the engine if it is idle. Without effect in every other state."""
        if self.state == "idle":
            self._woken.set()

    # -- supervision --------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Run engines one after the other until draining, or until they have died too often."""
        deaths: deque[float] = deque()
        while True:
            self._was_ready = False
            reason = await self._run_once()
            if self.state == "draining":
                return
            if self.state == "idle":
                deaths.clear()
                await self._sleep()
                continue
            if self._fatal is not None and not self._settled.is_set():
                self._die(self._fatal)  # the engine said that it cannot serve this; another would say the same
                return
            now = time.monotonic()
            if self._was_ready:
                deaths.clear()
            deaths.append(now)
            while now - deaths[0] > DEATH_WINDOW:
                deaths.popleft()
            log.error("engine ended", extra={"fields": {"reason": reason, "deaths": len(deaths)}})
            given_up = len(deaths) >= MAX_DEATHS
            problem = f"the engine ended {len(deaths)} times before it was ready; the last time: {reason}"
            if self.state == "waking" and (given_up or self._fatal is not None):
                failure = self._fatal or EngineError(problem)
                log.error("engine not woken", extra={"fields": {"error": failure.message}})
                # Clients are not told of folders of this machine. The next request tries again.
                told = "the engine could not be started again; the server's log says why"
                self._fail_all(EngineError(told, code=failure.code))
                self.state = "idle"
                deaths.clear()
                await self._sleep()
                continue
            if given_up:
                self._die(self._fatal or EngineError(problem))
                return
            if self._settled.is_set() and self.state != "waking":
                self.state = "restarting"
            self.restarts += 1
            self._clock.begin()
            await asyncio.sleep(self._backoff_seconds * (2 ** (len(deaths) - 1) - 1))

    async def _sleep(self) -> None:
        """Wait until somebody needs the engine."""
        await self._woken.wait()
        self._woken.clear()
        log.info("engine wakes up")
        self.state = "waking"

    async def _run_once(self) -> str:
        """Run one engine from launch to end; return why it ended and its last words."""
        self._fatal = None
        process: EngineProcess | None = None
        link: Link | None = None
        status: int | None = None
        try:
            self._clock.begin()
            sock, process = self._launch()
            _, link = await asyncio.get_running_loop().create_unix_connection(
                lambda: Link(self._on_messages), sock=sock
            )
            self._link = link
            why = await self._watch(process, link)
        except OSError as e:
            return f"it cannot be launched: {e}"
        finally:
            self._link = None
            hung_up = link is not None and link.hung_up
            if link is not None:
                link.close()
            if self.state == "ready":
                self.state = "restarting"
            self._forget_engine()
            if process is not None:
                patience = UNLOAD_SECONDS if self.state == "idle" else KILL_SECONDS
                status = await self._reap(process, patience if hung_up else 0.0)
        if status is not None:
            ended, meaning = explain_end(status)
            why = f"{ended} ({meaning})" if meaning else ended
        words = await asyncio.to_thread(process.last_words)
        return f"{why}: {words}" if words else why

    def _forget_engine(self) -> None:
        """Note that the engine has ended, which fails what was sent to it. Its counters are kept."""
        self.has_engine = False
        self._stats_before = self.stats
        self.stats, self.occupancy = counters.added(EngineStats(), self._stats_before), Occupancy()
        error: TandemError = EngineDied("the engine ended while the request was running")
        if self.state == "draining":
            error = EngineUnavailable("the server is shutting down")
        if self.state in ("idle", "waking"):
            self._fail_sent(error)
        else:
            self.info = None
            self._fail_all(error)
        if self.state != "idle":  # `unload` has counted it
            self.epoch += 1

    async def _watch(self, process: EngineProcess, link: Link) -> str:
        """Watch an engine until it ends and return why. When it is ready, begin to bring it up."""
        raising: asyncio.Task[None] | None = None
        try:
            while not await link.ended(WATCH_SECONDS):
                if self.state in ("starting", "waking", "restarting"):
                    self._show()
                if raising is None and self.has_engine:
                    raising = asyncio.create_task(self._bring_up())
                if process.wait(0.0) is not None:  # the socket may stay open in a compiler that the engine had started
                    await link.ended(WATCH_SECONDS)
                    break
                silent = time.monotonic() - link.heard
                if self.has_engine and silent > self._stall_seconds:
                    return f"no sign of life for {silent:.0f} s"
            return link.why
        finally:
            if raising is not None:
                raising.cancel()

    async def _reap(self, process: EngineProcess, wait: float) -> int | None:
        """Return the exit status of a process that ends by itself within `wait` seconds; kill any other, returning
        None.

        The status of a killed process says nothing about why the engine ended.
        """
        status = await asyncio.to_thread(process.wait, wait)
        if status is None:
            process.kill()
            await asyncio.to_thread(process.wait, KILL_SECONDS)
        return status

    async def _bring_up(self) -> None:
        """Run `on_ready` and accept requests afterwards. An error of `on_ready` ends the engine."""
        try:
            self._clock.enter("loading adapters")
            if self._on_ready is not None:
                await self._on_ready()
        except EngineError:
            return  # the engine died meanwhile, which the supervisor handles
        except TandemError as e:
            self._give_up(e)
            return
        except Exception:
            log.exception("the engine could not be set up")
            self._give_up(EngineError("the engine could not be set up"))
            return
        if self.state in ("starting", "waking", "restarting"):
            self._clock.end()
            self.state = "ready"
            self._was_ready = True
            self._settled.set()
            self._begin()
            await asyncio.to_thread(self._clock.keep)

    def _show(self) -> None:
        """Tell whoever shows the progress of a start how far it is."""
        if self._on_progress is not None:
            self._on_progress(self.progress)

    def _give_up(self, error: TandemError) -> None:
        """End the connection to an engine that cannot be brought up, and keep the error as the reason."""
        self._fatal = error
        if self._link is not None:
            self._link.close()

    def _die(self, failure: TandemError) -> None:
        """Enter the state "dead" for good."""
        self.state = "dead"
        self.failure = failure
        self._settled.set()
        self._dead.set()

    # -- messages of the engine ---------------------------------------------------------------------------------

    @abstractmethod
    def _on_messages(self, messages: list[Any]) -> None:
        """Handle the messages of one frame. Those about the engine itself go to `_on_news`."""

    @abstractmethod
    def _fail_all(self, error: TandemError) -> None:
        """End all streams and calls with an error."""

    @abstractmethod
    def _fail_sent(self, error: TandemError) -> None:
        """End the streams and calls that an engine has got; those that wait for one go on waiting."""

    @abstractmethod
    def _begin(self) -> None:
        """Send what has waited for the engine, which is ready now."""

    def _on_news(self, message: Any) -> None:
        """Keep what the engine says about itself."""
        if isinstance(message, Occupancy):
            self.occupancy = message
        elif isinstance(message, Heartbeat):
            self.stats = counters.added(message.stats, self._stats_before)
        elif isinstance(message, Progress):
            self._clock.enter(message.stage, message.fraction, once=message.once)
            self._show()
        elif isinstance(message, Note):
            fields = {"trace": message.trace} if message.trace else {}
            log.log(message.level, message.text, extra={"fields": fields})
        elif isinstance(message, Ready):
            self.info, self.has_engine = message.info, True
            if self._link is not None:
                self._link.nudge()
        elif isinstance(message, Fatal):
            kind = EngineError if self._settled.is_set() else ModelError
            self._fatal = kind(message.message, code=message.code)
