"""The client of the engine: submits requests, hands out their deltas, and supervises the process that runs the engine.

All of it belongs to one event loop. A frame from the engine costs one wake-up for each stream that it has deltas of,
and for each token no more than an append to a list.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from mlx_tandem.engine.calls import Answer, Calls, error_of
from mlx_tandem.engine.ending import explain_end
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.link import Link
from mlx_tandem.engine.messages import (
    Cancel,
    CloseTrainer,
    Drain,
    Failed,
    Fatal,
    FollowAdapter,
    ForwardBackward,
    Heartbeat,
    Inbound,
    KnowAdapter,
    Load,
    LoadAdapter,
    Note,
    OpenTrainer,
    OptimStep,
    Output,
    Preempted,
    Progress,
    PublishTrainer,
    Ready,
    SaveTrainer,
    SettleTrainer,
    Started,
    Submit,
    UnloadAdapter,
)
from mlx_tandem.engine.process import EngineProcess, Launch
from mlx_tandem.engine.stream import Stream
from mlx_tandem.errors import (
    EngineDied,
    EngineError,
    EngineUnavailable,
    ModelError,
    TandemError,
)
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineInfo, EngineStats, Request

log = logging.getLogger(__name__)

State = Literal["starting", "ready", "restarting", "draining", "dead"]

MAX_DEATHS = 3
"""Number of deaths within DEATH_WINDOW seconds after which the engine is given up. When an engine that had become ready
dies, the count begins anew."""

DEATH_WINDOW = 60.0
"""Seconds over which deaths are counted."""

WATCH_SECONDS = 0.25
"""Seconds between two looks at the process and its connection."""

KILL_SECONDS = 5.0
"""Seconds to wait for the end of a process that has hung up, or that was killed."""


class EngineClient:
    """The client that starts the engine, restarts it when it dies, and exchanges messages with it.

    `on_ready` runs each time an engine has sent Ready, before requests are accepted; it may call `load_adapter`. An
    error that it raises on the first start is final, as a model that cannot be loaded is.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        stall_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
        on_ready: Callable[[], Awaitable[None]] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ):
        self._launch = launch
        self._stall_seconds = stall_seconds
        self._backoff_seconds = backoff_seconds
        self._on_ready = on_ready
        self._on_progress = on_progress
        self.state: State = "starting"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.load = Load()  # sent more often than the stats
        self.progress = Progress("starting", 0.0)
        self.failure: TandemError | None = None  # the error behind the state "dead"
        self.restarts = 0
        self._ids = itertools.count(1)
        self._calls = Calls()
        self._streams: dict[int, Stream] = {}
        self._link: Link | None = None
        self._fatal: TandemError | None = None
        self._settled = asyncio.Event()  # ready for the first time, or dead
        self._dead = asyncio.Event()
        self._was_ready = False
        self._supervisor: asyncio.Task[None] | None = None

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
        """Accept no more requests; running ones continue."""
        if self.state != "dead":
            self.state = "draining"

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
            self._supervisor.cancel()
            await asyncio.wait({self._supervisor})

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def next_ids(self, count: int) -> range:
        """Return `count` consecutive request ids that nobody has used, for one stream."""
        first = next(self._ids)
        for _ in range(count - 1):
            next(self._ids)
        return range(first, first + count)

    def check_ready(self) -> EngineInfo:
        """Return the description of the running engine. Raises EngineUnavailable unless requests are accepted now."""
        if self.state != "ready" or self.info is None:
            raise EngineUnavailable(_WHY_NOT[self.state])
        return self.info

    def submit(self, *requests: Request) -> Stream:
        """Send requests with consecutive ids and the same `n`; return one stream with the deltas of all of them.

        Raises EngineUnavailable unless requests are accepted now.
        """
        self.check_ready()
        assert self._link is not None
        stream = Stream(self, requests)
        for request in requests:
            self._streams[request.id] = stream
        self._link.send(*map(Submit, requests))
        return stream

    def cancel(self, request: int, choice: int | None = None) -> None:
        """Tell the engine that nobody waits for a request, or for one choice of it, any more."""
        if choice is None:
            self._streams.pop(request, None)
        if self._link is not None:
            self._link.send(Cancel(request, choice))

    def forget(self, request: int) -> None:
        """Drop the stream of a request whose end it has seen."""
        self._streams.pop(request, None)

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        """Have the engine read and check a folder, and return what it holds. Raises the error that
        the engine reports.
        """
        info = await self._call(lambda call: LoadAdapter(call, source, pin))
        assert isinstance(info, AdapterInfo)
        return info

    def know_adapter(self, info: AdapterInfo, source: AdapterSource, pin: bool = False) -> None:
        """Tell a new engine of a version that an earlier one had loaded; it is read when a request needs it."""
        if self._link is None or self.info is None:
            raise EngineUnavailable(_WHY_NOT[self.state])
        self._link.send(KnowAdapter(info, source, pin))

    async def unload_adapter(self, digest: str) -> None:
        """Have the engine forget a version once its last row has ended."""
        await self._call(lambda call: UnloadAdapter(call, digest))

    # -- learning -----------------------------------------------------------------------------------------------

    def follow_adapter(self, ref: AdapterRef) -> None:
        """Let running requests that follow `ref.name` continue under `ref`."""
        if self._link is not None:
            self._link.send(FollowAdapter(ref))

    async def open_trainer(self, spec: TrainerSpec, *, folder: str = "", digest: str = "") -> TrainerInfo:
        """Open a trainer. Raises InvalidRequest or ModelError for what cannot be trained or read.

        Its arrays come from the checkpoint in `folder`, else from the loaded adapter `digest`, else they are new.
        """
        info = await self._call(lambda call: OpenTrainer(call, spec, folder, digest))
        assert isinstance(info, TrainerInfo)
        return info

    async def close_trainer(self, trainer: str) -> None:
        """Close a trainer and give back its memory."""
        await self._call(lambda call: CloseTrainer(call, trainer))

    async def run_pass(
        self, batches: Sequence[Batch], *, forward_only: bool = False, micro_batch_tokens: int = 0
    ) -> tuple[BatchResult, ...]:
        """Run one forward and backward pass over the batches of several trainers and return a result for each batch.

        Gradients add up until `step_trainer`. `micro_batch_tokens` 0: as configured.
        """
        results = await self._call(lambda call: ForwardBackward(call, tuple(batches), forward_only, micro_batch_tokens))
        assert isinstance(results, tuple)
        return results

    async def step_trainer(self, trainer: str, adam: AdamParams) -> StepDone:
        """Take one step of the optimiser, which `settle_trainer` can still take back."""
        done = await self._call(lambda call: OptimStep(call, trainer, adam))
        assert isinstance(done, StepDone)
        return done

    async def settle_trainer(self, trainer: str, *, keep: bool) -> None:
        """Keep the last step of the optimiser, or take it and all gradients back."""
        await self._call(lambda call: SettleTrainer(call, trainer, keep))

    async def publish_trainer(self, trainer: str) -> AdapterInfo:
        """Make the trainer's weights an adapter version that requests may name by its digest, and return it."""
        info = await self._call(lambda call: PublishTrainer(call, trainer))
        assert isinstance(info, AdapterInfo)
        return info

    async def save_trainer(self, trainer: str, folder: str) -> None:
        """Write adapter and optimiser into an empty folder, and return once they are on disk."""
        await self._call(lambda call: SaveTrainer(call, trainer, folder))

    async def _call(self, message: Callable[[int], Inbound]) -> Any:
        """Send a message that has one answer, and return the answer. Raises the error that the engine reports."""
        if self._link is None or self.info is None:
            raise EngineUnavailable(_WHY_NOT[self.state])
        call = next(self._ids)
        with self._calls.open(call) as answer:
            self._link.send(message(call))
            return await answer

    # -- supervision --------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Run engines one after the other until draining, or until they have died too often."""
        deaths: deque[float] = deque()
        loop = asyncio.get_running_loop()
        while True:
            self._was_ready = False
            reason = await self._run_once()
            if self.state == "draining":
                return
            if self._fatal is not None and not self._settled.is_set():
                self._die(self._fatal)  # the engine said that it cannot serve this; another would say the same
                return
            now = loop.time()
            if self._was_ready:
                deaths.clear()
            deaths.append(now)
            while now - deaths[0] > DEATH_WINDOW:
                deaths.popleft()
            log.error("engine ended", extra={"fields": {"reason": reason, "deaths": len(deaths)}})
            if len(deaths) >= MAX_DEATHS:
                problem = f"the engine ended {len(deaths)} times before it was ready; the last time: {reason}"
                self._die(self._fatal or EngineError(problem))
                return
            if self._settled.is_set():
                self.state = "restarting"
            self.restarts += 1
            self.progress = Progress("restarting", 0.0)
            await asyncio.sleep(self._backoff_seconds * (2 ** (len(deaths) - 1) - 1))

    async def _run_once(self) -> str:
        """Run one engine from launch to end; return why it ended and its last words."""
        self._fatal = None
        self.info = None
        self.load = Load()
        process: EngineProcess | None = None
        link: Link | None = None
        status: int | None = None
        try:
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
            self.info = None
            hung_up = link is not None and link.hung_up
            if link is not None:
                link.close()
            if self.state == "ready":
                self.state = "restarting"
            self._fail_all(self._fatal_for_streams())
            if process is not None:
                status = await self._reap(process, KILL_SECONDS if hung_up else 0.0)
        if status is not None:
            ended, meaning = explain_end(status)
            why = f"{ended} ({meaning})" if meaning else ended
        words = await asyncio.to_thread(process.last_words)
        return f"{why}: {words}" if words else why

    async def _watch(self, process: EngineProcess, link: Link) -> str:
        """Watch an engine until it ends and return why. When it is ready, begin to bring it up."""
        raising: asyncio.Task[None] | None = None
        try:
            while not await link.ended(WATCH_SECONDS):
                if raising is None and self._said_ready():
                    raising = asyncio.create_task(self._bring_up())
                if process.wait(0.0) is not None:  # the socket may stay open in a compiler that the engine had started
                    await link.ended(WATCH_SECONDS)
                    break
                silent = asyncio.get_running_loop().time() - link.heard
                if self._said_ready() and silent > self._stall_seconds:
                    return f"no sign of life for {silent:.0f} s"
            return link.why
        finally:
            if raising is not None:
                raising.cancel()

    def _said_ready(self) -> bool:
        return self.info is not None

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
        if self.state in ("starting", "restarting"):
            self.state = "ready"
            self._was_ready = True
            self._settled.set()

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

    def _fatal_for_streams(self) -> TandemError:
        if self.state == "draining":
            return EngineUnavailable("the server is shutting down")
        return EngineDied("the engine ended while the request was running")

    def _fail_all(self, error: TandemError) -> None:
        """End all streams and calls with an error."""
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
        self._calls.fail(error)

    # -- messages of the engine ---------------------------------------------------------------------------------

    def _on_messages(self, messages: list[Any]) -> None:
        """Hand the messages of one frame to the streams and calls that they belong to."""
        streams = self._streams
        for message in messages:
            if isinstance(message, Output):
                for delta in message.deltas:
                    stream = streams.get(delta.request)
                    if stream is not None:
                        stream.push(delta)
            elif isinstance(message, Load):
                self.load = message
            elif isinstance(message, Started):
                stream = streams.get(message.request)
                if stream is not None and stream.started is None:
                    stream.started = message.at
            elif isinstance(message, Preempted):
                stream = streams.get(message.request)
                if stream is not None:
                    stream.preemptions += 1
            elif isinstance(message, Heartbeat):
                self.stats = message.stats
            elif isinstance(message, Failed):
                stream = streams.pop(message.request, None)
                if stream is not None:
                    error = error_of(message.code, message.message, message.param, message.retryable)
                    stream.fail(error, message.request)
            elif isinstance(message, Answer):
                self._calls.settle(message)
            elif isinstance(message, Progress):
                self.progress = message
                if self._on_progress is not None:
                    self._on_progress(message)
            elif isinstance(message, Note):
                fields = {"trace": message.trace} if message.trace else {}
                log.log(message.level, message.text, extra={"fields": fields})
            elif isinstance(message, Ready):
                self.info = message.info
                if self._link is not None:
                    self._link.nudge()
            elif isinstance(message, Fatal):
                kind = EngineError if self._settled.is_set() else ModelError
                self._fatal = kind(message.message, code=message.code)


_WHY_NOT: dict[State, str] = {
    "starting": "the model is still loading",
    "ready": "the engine is not ready",
    "restarting": "the engine is restarting",
    "draining": "the server is shutting down",
    "dead": "the engine cannot be started",
}
