"""The client of the engine: submits requests, hands out their deltas, and calls its adapters and trainers.

All of it belongs to one event loop. A frame from the engine costs one wake-up for each stream that it has deltas of,
and for each token an append to a list and a note of its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mlx_tandem.engine.client.calls import Answer, Calls, error_of
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.start_times import KeptTimes, StartProgress
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.engine.client.supervisor import WHY_NOT, Supervisor
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.messages import (
    Accepted,
    Cancel,
    CloseTrainer,
    Failed,
    FollowAdapter,
    ForwardBackward,
    Inbound,
    KnowAdapter,
    LoadAdapter,
    OpenTrainer,
    OptimStep,
    Output,
    Preempted,
    PublishTrainer,
    Report,
    SaveTrainer,
    SettleTrainer,
    Started,
    Submit,
    UnloadAdapter,
)
from mlx_tandem.errors import EngineUnavailable, TandemError
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, EngineInfo, Request

REPORT_SECONDS = 1.0
"""Seconds to wait for the engine's report before its last one is used."""


class EngineClient(Supervisor):
    """The client of a supervised engine, with the requests and calls that have not ended."""

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
        super().__init__(
            launch,
            stall_seconds=stall_seconds,
            backoff_seconds=backoff_seconds,
            on_ready=on_ready,
            on_progress=on_progress,
            times=times,
        )
        self._ids = itertools.count(1)
        self._calls = Calls()
        self._streams: dict[int, Stream] = {}

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the names of the adapters of requests that run, and of other adapters, whose requests only wait."""
        running = {stream.adapter for stream in self._streams.values() if stream.started is not None} - {""}
        return running, {stream.adapter for stream in self._streams.values()} - {""} - running

    def next_ids(self, count: int) -> range:
        """Return `count` consecutive request ids that nobody has used, for one stream."""
        first = next(self._ids)
        for _ in range(count - 1):
            next(self._ids)
        return range(first, first + count)

    def check_ready(self) -> EngineInfo:
        """Return the description of the running engine. Raises EngineUnavailable unless requests are accepted now."""
        if self.state != "ready" or self.info is None:
            raise EngineUnavailable(WHY_NOT[self.state])
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

    async def refresh(self) -> None:
        """Update `stats` and `occupancy`, so that they include everything that the engine has done and was sent before.

        They stay as they are if there is no engine, or if the engine does not reply within REPORT_SECONDS, for example
        during a long step.
        """
        with contextlib.suppress(TandemError, TimeoutError):
            await asyncio.wait_for(self._call(Report), REPORT_SECONDS)

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
            raise EngineUnavailable(WHY_NOT[self.state])
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

    async def step_trainer(self, trainer: str, adam: AdamParams, *, more: bool = False) -> StepDone:
        """Take one step of the optimiser, which `settle_trainer` can still take back.

        With `more` it is taken back together with the next one.
        """
        done = await self._call(lambda call: OptimStep(call, trainer, adam, more))
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

    async def save_trainer(self, trainer: str, folder: str, *, optimizer: bool = True) -> None:
        """Write the adapter, and with `optimizer` its state, into an empty folder, and return once they are on disk."""
        await self._call(lambda call: SaveTrainer(call, trainer, folder, optimizer))

    async def _call(self, message: Callable[[int], Inbound]) -> Any:
        """Send a message that has one answer, and return the answer. Raises the error that the engine reports."""
        if self._link is None or self.info is None:
            raise EngineUnavailable(WHY_NOT[self.state])
        call = next(self._ids)
        with self._calls.open(call) as answer:
            self._link.send(message(call))
            return await answer

    # -- messages of the engine ---------------------------------------------------------------------------------

    def _on_messages(self, messages: list[Any]) -> None:
        """Hand the messages of one frame to the streams and calls that they belong to."""
        streams = self._streams
        for message in messages:
            if isinstance(message, Output):
                for delta in message.deltas:
                    stream = streams.get(delta.request)
                    if stream is not None:
                        stream.push(delta, message.at)
            elif isinstance(message, Started):
                stream = streams.get(message.request)
                if stream is not None and stream.started is None:
                    stream.started = message.at
            elif isinstance(message, Accepted):
                stream = streams.get(message.request)
                if stream is not None:
                    stream.accept()
            elif isinstance(message, Preempted):
                stream = streams.get(message.request)
                if stream is not None:
                    stream.preemptions += 1
            elif isinstance(message, Failed):
                stream = streams.pop(message.request, None)
                if stream is not None:
                    error = error_of(message.code, message.message, message.param, message.retryable)
                    stream.fail(error, message.request)
            elif isinstance(message, Answer):
                self._calls.settle(message)
            else:
                self._on_news(message)

    def _fail_all(self, error: TandemError) -> None:
        """End all streams and calls with an error."""
        streams = set(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(error)
        self._calls.fail(error)
