"""The client of the engine: submits requests, hands out their deltas, and calls its adapters and trainers.

All of it belongs to one event loop. A frame from the engine costs one wake-up for each stream that it has deltas of,
and for each token an append to a list and a note of its time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mlx_tandem.engine.client.calls import Answer, error_of
from mlx_tandem.engine.client.process import Launch
from mlx_tandem.engine.client.stream import Stream
from mlx_tandem.engine.client.supervisor import WHY_NOT
from mlx_tandem.engine.client.wakeable_engine import WakeableEngine
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.messages import (
    Accepted,
    Cancel,
    CloseTrainer,
    Failed,
    FollowAdapter,
    ForwardBackward,
    KnowAdapter,
    LoadAdapter,
    OpenTrainer,
    OptimStep,
    Output,
    Preempted,
    PublishTrainer,
    SaveTrainer,
    SettleTrainer,
    Started,
    Submit,
    UnloadAdapter,
)
from mlx_tandem.errors import EngineUnavailable, TandemError
from mlx_tandem.types import AdapterInfo, AdapterRef, AdapterSource, Request


class EngineClient(WakeableEngine):
    """The client of a supervised engine, with the requests that have not ended."""

    def __init__(self, launch: Launch, **options: Any):
        """Begin without a process. `options` are those of `Supervisor`."""
        super().__init__(launch, **options)
        self._streams: dict[int, Stream] = {}
        self._held: dict[int, Request] = {}  # requests that wait for the engine to wake up, by their ids

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def adapters_in_use(self) -> tuple[set[str], set[str]]:
        """Return the names of the adapters of requests that run, and of other adapters, whose requests only wait."""
        running = {stream.adapter for stream in self._streams.values() if stream.started is not None} - {""}
        return running, {stream.adapter for stream in self._streams.values()} - {""} - running

    def submit(self, *requests: Request) -> Stream:
        """Send requests with consecutive ids and the same `n`; return one stream with the deltas of all of them.

        Requests to an idle engine wake it and are sent when it is ready. Raises EngineUnavailable unless requests are
        accepted now.
        """
        self.check_ready()
        stream = Stream(self, requests)
        for request in requests:
            self._streams[request.id] = stream
        if self.state == "ready":
            assert self._link is not None
            self._link.send(*map(Submit, requests))
        else:
            self._held.update((request.id, request) for request in requests)
            self.wake()
        return stream

    def cancel(self, request: int, choice: int | None = None) -> None:
        """Tell the engine that nobody waits for a request, or for one choice of it, any more."""
        if choice is None:
            self.forget(request)
            if self._held.pop(request, None) is not None:
                return
        if self._link is not None:
            self._link.send(Cancel(request, choice))

    def forget(self, request: int) -> None:
        """Drop the stream of a request whose end it has seen."""
        self._streams.pop(request, None)
        self._used_at = time.monotonic()

    async def load_adapter(self, source: AdapterSource, pin: bool = False) -> AdapterInfo:
        """Have the engine read and check a folder, and return what it holds. Raises the error that
        the engine reports.
        """
        info = await self._call(lambda call: LoadAdapter(call, source, pin))
        assert isinstance(info, AdapterInfo)
        return info

    def know_adapter(self, info: AdapterInfo, source: AdapterSource, pin: bool = False) -> None:
        """Tell a new engine of a version that an earlier one had loaded; it is read when a request needs it."""
        if self.state == "idle":
            return  # It is told about all of them when it wakes up.
        if self._link is None or not self.has_engine:
            raise EngineUnavailable(WHY_NOT[self.state])
        self._link.send(KnowAdapter(info, source, pin))

    async def unload_adapter(self, digest: str) -> None:
        """Have the engine forget a version once its last row has ended."""
        if self.state == "idle":
            return  # There is none that knows it.
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

    @property
    def is_used(self) -> bool:
        """Whether anybody uses the engine or waits for it."""
        return bool(self._streams) or super().is_used

    def _begin(self) -> None:
        """Send the requests that have waited for the engine, which is ready now, and let others who wait go on."""
        assert self._link is not None
        held, self._held = list(self._held.values()), {}
        self._link.send(*map(Submit, held))
        super()._begin()

    def _fail_sent(self, error: TandemError) -> None:
        """End the streams and calls that an engine has got; those that wait for one go on waiting."""
        streams = {stream for request, stream in self._streams.items() if request not in self._held}
        self._streams = {request: stream for request, stream in self._streams.items() if request in self._held}
        for stream in streams:
            stream.fail(error)
        super()._fail_sent(error)

    def _fail_all(self, error: TandemError) -> None:
        """End all streams and calls with an error."""
        self._held.clear()
        super()._fail_all(error)
