"""The engine's loop: receive messages, turn the pipeline, send the results.

One thread runs the loop, and nothing else touches the device. Errors are contained: a bad request fails alone, a failed
step fails the requests in it, and failed learning fails its message. Three failures of the device within a minute, or a
broken invariant, end the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from msgspec import structs

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.grammars.masks import Grammars
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.pipeline import Pipeline, StepsLost
from mlx_tandem.engine.thought_budgets import ThoughtBudgets
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.kv.disk.opening import Opening
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.types import AdapterRef, EngineStats, MemoryInUse, Request

log = logging.getLogger(__name__)

STRIKES = 3
"""Failures of the device within STRIKE_SECONDS that end the engine."""

STRIKE_SECONDS = 60.0
"""Seconds over which failures of the device are counted."""

LAST_SECONDS = 3.0
"""Seconds that the end of the engine waits for blocks to be saved, and then again for the drive to write them."""

_POLL_SECONDS = 0.001  # between two looks at what other threads have done
_DRIVE_SECONDS = 0.02  # between two looks at a read from the drive or at masks


class EngineFailure(Exception):
    """Raised when the engine cannot go on."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """The sources of the statistics about memory on the device."""

    pool: BlockPool
    slots: SlotTable
    memory: Callable[[], MemoryInUse] = MemoryInUse
    slot_bytes: Callable[[], int] = lambda: 0  # of all adapter slots


class EngineCore:
    """The loop of one engine, which serves the messages of its channel."""

    def __init__(
        self,
        channel: EngineChannel,
        pipeline: Pipeline,
        adapters: Adapters,
        grammars: Grammars,
        gauges: Gauges,
        *,
        heartbeat_seconds: float,
        opening: Opening | None = None,
        on_turn: Callable[[], None] = lambda: None,
    ):
        """Create an engine. `opening` gives it the drive once that is there; `on_turn` is called in each turn."""
        self._channel = channel
        self._pipeline = pipeline
        self._scheduler = pipeline.scheduler
        self._trainers = pipeline.trainers
        self._offload = pipeline.scheduler.offload
        self._adapters = adapters
        self._grammars = grammars
        self._scheduler.mask_maker = ThoughtBudgets(self._scheduler.vocab_size, grammars)
        self._gauges = gauges
        self._heartbeat_seconds = heartbeat_seconds
        self._opening = opening
        self._on_turn = on_turn
        self._outbox: list[m.Outbound] = []
        self._occupancy = m.Occupancy()  # as last sent
        self._freed = False  # by a cancellation, so that the front is sent the occupancy
        self._failures: deque[float] = deque()  # of the device, in seconds of time.monotonic
        self._next_heartbeat = 0.0
        self._is_draining = False
        self._step_failures = 0
        self._next_piece = 0.0  # seconds of time.monotonic before which nothing is made ready for adapters
        self._waits = False  # all work that there is waits for the drive or for masks

    def run(self) -> None:
        """Run the loop until it is drained or the front is gone. Raises EngineFailure when the engine must end."""
        try:
            while not (self._is_draining and self._is_idle):
                self.turn()
            self._save_all()
        except WireError as e:
            log.info("engine ends: %s", e)
            self._save_all()
        finally:
            self._pipeline.rest()
            self._adapters.close()
            self._grammars.close()
            self._trainers.close()
            if self._opening is not None:
                self._opening.close(LAST_SECONDS)

    def _save_all(self) -> None:
        """Save cached blocks to the drive for the next process, as many as the drive accepts within LAST_SECONDS."""
        drive = self._opening.cache if self._opening is not None else None
        if self._offload is None or drive is None or drive.stats().off:
            return
        deadline = time.monotonic() + LAST_SECONDS
        try:
            self._trainers.stop()
            for request in list(self._scheduler.requests):  # nobody waits for them any more
                self._scheduler.cancel(request)
            self._pipeline.drain()
            self._offload.saves.save_all()
            while self._offload.saves.has_unsaved and time.monotonic() < deadline:
                self._on_turn()
                if self._pipeline.turn() is None and self._pipeline.is_empty:
                    time.sleep(_POLL_SECONDS)  # the drive's queue is full
        except StepsLost as e:
            log.info("not everything was saved: %s", e)

    def turn(self) -> None:
        """Run one turn of the loop."""
        self._on_turn()
        if self._opening is not None and self._offload is not None and (opened := self._opening.poll()):
            self._offload.open(*opened)
        self._receive()
        self._send()  # clients are told at once that they are accepted, since a step may take long
        self._work()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_seconds
            self._outbox.append(m.Heartbeat(self.stats()))
        self._flush()

    def _flush(self) -> None:
        """Send what there is to say in one frame, with the occupancy if it has changed."""
        started, preempted = self._scheduler.take_events()
        if self._scheduler.abandoned_ended:
            self._scheduler.abandoned_ended = False
            self._release_adapters()
            self._freed = True
        self._outbox += [m.Started(request, at) for request, at in started]
        self._outbox += [m.Preempted(request) for request in preempted]
        if self._outbox or self._freed:
            self._freed = False
            self._send_occupancy()
        self._send()

    def _send(self) -> None:
        """Send what there is in the outbox in one frame."""
        if self._outbox:
            self._channel.send(self._outbox)
            self._outbox = []

    def _report_now(self, call: int) -> None:
        """Answer a call for the counters, which include all messages that were received before the call."""
        self._send_occupancy()
        self._outbox += [m.Heartbeat(self.stats()), m.CallDone(call)]

    def _send_occupancy(self) -> None:
        """Add the occupancy to the outbox if it has changed since it was last sent."""
        s, pool = self._scheduler, self._gauges.pool
        deferred = self._num_deferred
        occupancy = m.Occupancy(
            s.queue.num_running, s.queue.num_waiting + deferred, pool.used_blocks, pool.free_blocks, deferred
        )
        if occupancy != self._occupancy:
            self._occupancy = occupancy
            self._outbox.append(occupancy)

    def stats(self) -> EngineStats:
        """Return the counters since the start and the current gauges."""
        gauges, counts, time_share = self._gauges, self._pipeline.counts, self._pipeline.time_share
        memory = gauges.memory()
        s, store = self._scheduler, self._adapters.store
        prefixes, offload = s.prefix_counts, self._offload
        unsaved = offload.saves.unsaved if offload is not None else 0
        disk = self._opening.cache.stats() if self._opening is not None and self._opening.cache is not None else None
        if disk is not None:
            disk = structs.replace(disk, dropped=disk.dropped + unsaved)
        return EngineStats(
            cached_blocks=prefixes.blocks,
            prefix_queries=prefixes.queries,
            prefix_hits=prefixes.hits,
            prefix_evictions=prefixes.evictions,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            preemptions=s.queue.preemptions,
            steps=counts.steps,
            step_failures=self._step_failures,
            step_ms=counts.step_ms,
            rows=counts.rows,
            lora_rows=counts.lora_rows,
            active_memory=memory.active,
            peak_memory=memory.peak,
            kept_memory=memory.kept,
            compiled_steps=memory.compiled_steps,
            resident_adapters=gauges.slots.residents(),
            loaded_adapters=len(store),
            loaded_adapter_bytes=store.nbytes,
            adapter_evictions=store.evictions,
            adapter_slot_bytes=gauges.slot_bytes(),
            serving_ms=time_share.serving_ms,
            training_ms=time_share.training_ms,
            training_jobs=self._trainers.jobs,
            passes=self._trainers.passes(),
            step_tokens=tuple(counts.step_tokens.counts),
            step_tokens_sum=int(counts.step_tokens.total),
            batch_fill=tuple(counts.batch_fill),
            prompt_tokens_per_s=counts.prompt_rate,
            decode_tokens_per_s=counts.decode_rate,
            speculation=s.drafting.stats(),
            disk=disk,
            disk_hit_tokens=offload.reads.hit_tokens if offload is not None else 0,
            disk_unsaved=unsaved,
        )

    @property
    def _is_idle(self) -> bool:
        """Whether there is nothing to do, neither on the device nor on other threads."""
        loads = not (self._adapters.is_idle and self._grammars.is_idle)
        return self._is_resting and not (loads or self._trainers.is_waiting)

    @property
    def _num_deferred(self) -> int:
        """Number of choices of the requests that wait for their adapter or their grammar."""
        return self._adapters.num_waiting + sum(r.n for r in self._grammars.waiting)

    @property
    def _is_resting(self) -> bool:
        """Whether there is nothing to do on the device."""
        saving = self._offload is not None and self._offload.saves.is_saving
        works = self._scheduler.requests or self._trainers.has_work or self._adapters.is_preparing
        return self._pipeline.is_empty and not (works or saving)

    # inbox

    def _receive(self) -> None:
        """Handle the messages that have arrived and what other threads have finished.

        Wait for them only when the device has nothing to do.
        """
        if self._waits:
            wait = _DRIVE_SECONDS
        elif not self._is_resting:
            wait = 0.0
        elif self._adapters.is_loading or self._trainers.is_waiting:
            wait = _POLL_SECONDS
        else:
            wait = max(self._next_heartbeat - time.monotonic(), 0.0)
        for message in self._channel.receive(wait):
            match message:
                case m.Submit():
                    self._submit(message.request)
                case m.Cancel():
                    if message.choice is None:
                        self._adapters.cancel(message.request)
                        self._grammars.cancel(message.request)
                    self._scheduler.cancel(message.request, message.choice, keep=True)
                    self._release_adapters()
                    self._freed = True
                case m.LoadAdapter():
                    self._adapters.load(message)
                case m.KnowAdapter():
                    self._adapters.know(message)
                case m.UnloadAdapter():
                    self._adapters.unload(message.digest)
                    self._outbox.append(m.CallDone(message.call))
                case m.FollowAdapter():
                    if self._adapters.can_follow(message.ref):
                        self._follow(message.ref)
                case m.Report():
                    self._report_now(message.call)
                case m.Drain():
                    self._is_draining = True
                    self._trainers.stop()
                case _:
                    self._trainers.submit(message)
        if not self._adapters.is_idle:
            arrived = self._adapters.poll()
            self._outbox += arrived.answers
            for ref in arrived.followed:
                self._follow(ref)
            for request in arrived.requests:
                self._schedule(request)
        for request in self._grammars.poll():
            self._schedule(request)
        self._outbox += self._trainers.answers()

    def _submit(self, request: Request) -> None:
        """Schedule a request, let it wait for its adapter and its grammar, or refuse it."""
        try:
            if self._is_draining:
                raise TandemError("the engine is draining", code="engine_unavailable")
            if not self._adapters.hold(request):
                return
        except TandemError as e:
            self._refuse(request, e)
            return
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """Hand a request whose adapter is in memory to the scheduler once it has its grammar, or refuse it."""
        try:
            if self._grammars.hold(request):
                self._scheduler.add(request)
                self._outbox.append(m.Accepted(request.id))
        except TandemError as e:
            self._adapters.holds.release(request.id)
            self._grammars.release(request)
            self._refuse(request, e)

    def _follow(self, ref: AdapterRef) -> None:
        """Let all requests that follow the name of `ref` continue under it."""
        self._adapters.follow(ref, self._scheduler.follow(ref))

    def _refuse(self, request: Request, e: TandemError) -> None:
        """Answer a request with an error."""
        retryable = not isinstance(e, InvalidRequest)
        self._outbox.append(m.Failed(request.id, e.code or "invalid_value", e.message, e.param, retryable))

    def _release_adapters(self) -> None:
        """Give back the adapters of requests that have ended."""
        waiting = {request.id for request in self._grammars.waiting}
        self._adapters.holds.release_ended(
            waiting.union(self._scheduler.requests) if waiting else self._scheduler.requests
        )

    # work on the device

    def _work(self) -> None:
        """Turn the pipeline once and add the results to the outbox, those of learning in the same
        frame as the tokens.
        """
        was_empty = self._pipeline.is_empty
        outcome = None
        try:
            if self._adapters.is_preparing:
                self._prepare_adapters()
            outcome = self._pipeline.turn()
        except StepsLost as e:
            # The frames of these tracebacks hold the arrays of the step, and with them the pool that `_fail` replaces.
            e.__traceback__ = e.__cause__ = e.__context__ = None
            if e.outcome is not None:
                self._report(e.outcome)
            self._fail(e)
        self._outbox += self._trainers.answers()
        if outcome is not None:
            self._report(outcome)
        for failure in self._trainers.device_failures():
            self._strike(f"learning: {failure}")
        # Nothing was in flight, and nothing could be launched.
        idle = was_empty and self._pipeline.is_empty and not self._trainers.has_work
        reading = self._offload is not None and self._offload.reads.is_reading
        self._waits = idle and (reading or self._grammars.is_making)
        if self._adapters.holds.has_left:
            self._adapters.holds.let_go(self._scheduler.digests)

    def _prepare_adapters(self) -> None:
        """Do a piece of what has to be ready before the first adapter is served. While requests run, they get as much
        time after each piece as it took. Raises StepsLost.
        """
        began = time.monotonic()
        if self._scheduler.requests and began < self._next_piece:
            return
        outcome = self._pipeline.drain()  # a measurement may share the device with nothing
        if outcome is not None:
            self._report(outcome)
        self._adapters.prepare()
        now = time.monotonic()
        self._next_piece = now + (now - began)

    def _report(self, outcome: StepOutcome) -> None:
        """Add the outcome of a step to the outbox."""
        if outcome.deltas:
            self._outbox.append(m.Output(outcome.deltas))
        for request in outcome.failed:
            if (e := self._grammars.failure(request)) is not None:
                self._outbox.append(m.Failed(request, "grammar_too_complex", e.message, e.param, retryable=False))
                continue
            self._outbox.append(m.Failed(request, "numerical_error", "the model's output was not finite"))
        for request, why in outcome.unencoded.items():
            self._outbox.append(m.Failed(request, "invalid_image", why, "images", retryable=False))
        if outcome.failed or outcome.unencoded or any(d.finish for d in outcome.deltas):
            self._release_adapters()

    def _fail(self, lost: StepsLost) -> None:
        """Fail the requests of lost steps unless they can be computed again, and reset the runner."""
        log.error("a step failed%s: %s", " and is computed again" if lost.again else "", lost)
        self._step_failures += 1
        for request in self._scheduler.fail(lost.plans, again=lost.again):
            self._outbox.append(m.Failed(request, "step_failed", "the step that computed this request failed"))
        self._release_adapters()
        if not lost.again:
            self._strike(str(lost))
        self._pipeline.runner.reset()

    def _strike(self, what: str) -> None:
        """Count a failure of the device. Raises EngineFailure when there have been too many."""
        now = time.monotonic()
        self._failures.append(now)
        while now - self._failures[0] > STRIKE_SECONDS:
            self._failures.popleft()
        if len(self._failures) >= STRIKES:
            self._channel.send(self._outbox)
            raise EngineFailure(f"{STRIKES} failures within {STRIKE_SECONDS:.0f} s; the last: {what}")
