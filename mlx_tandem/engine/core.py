"""The engine's loop: drain the inbox, plan, launch, and while that runs, settle the step before.

Between steps, when `Duty` says so, slices of learning run with the device to themselves.

One thread turns it and nothing else touches the device. Errors are contained: a bad request fails alone, a failed step
fails its rows, a failed slice its message, and three failures in a minute or a broken invariant end the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.engine.duty import Duty
from mlx_tandem.engine.pipeline import Pipeline, StepsLost
from mlx_tandem.engine.plan import Runner
from mlx_tandem.engine.scheduler import Scheduler, Settled
from mlx_tandem.engine.training import Training, TrainingFailed
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.kv.disk.opening import Opening
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.types import AdapterRef, EngineStats, MemoryInUse, Request

log = logging.getLogger(__name__)

STRIKES = 3
STRIKE_SECONDS = 60.0
LAST_SECONDS = 3.0
"""That the end waits for blocks to be saved, and then for the drive to write them."""
_POLL_SECONDS = 0.001
_DRIVE_SECONDS = 0.02  # until a read that takes too long is looked at again


class EngineFailure(Exception):
    """The engine cannot go on."""


class EngineCore:
    def __init__(
        self,
        channel: EngineChannel,
        runner: Runner,
        scheduler: Scheduler,
        pool: BlockPool,
        slots: SlotTable,
        adapters: Adapters,
        training: Training,
        duty: Duty,
        *,
        heartbeat_seconds: float,
        opening: Opening | None = None,
        memory: Callable[[], MemoryInUse] = MemoryInUse,
        slot_bytes: Callable[[], int] = lambda: 0,
        on_turn: Callable[[], None] = lambda: None,
    ):
        self._channel = channel
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._slots = slots
        self._adapters = adapters
        self._training = training
        self._duty = duty
        self._heartbeat_seconds = heartbeat_seconds
        self._opening = opening
        self._tier = scheduler.tier
        self._memory = memory
        self._slot_bytes = slot_bytes
        self._on_turn = on_turn
        self._pipeline = Pipeline(scheduler, runner, duty)
        self._outbox: list[m.Outbound] = []
        self._load = m.Load()  # as last sent
        self._freed = False  # by a cancellation, of which nothing else tells the front
        self._failures: deque[float] = deque()
        self._next_heartbeat = 0.0
        self._draining = False
        self._step_failures = 0
        self._sliced = False  # the last turn was learning's
        self._waits = False  # what there is to do waits for the drive

    def run(self) -> None:
        """Turn until drained or the front is gone. Raises EngineFailure when the engine must end."""
        try:
            while not (self._draining and self._is_idle):
                self.turn()
            self._save_all()
        except WireError as e:
            log.info("engine ends: %s", e)
            self._save_all()
        finally:
            self._adapters.close()
            self._training.close()
            if self._opening is not None:
                self._opening.close(LAST_SECONDS)

    def _save_all(self) -> None:
        """What is in memory is on the drive for who comes next, as far as the drive takes it in a little time."""
        drive = self._opening.cache if self._opening is not None else None
        if self._tier is None or drive is None or drive.stats().off:
            return
        deadline = time.monotonic() + LAST_SECONDS
        try:
            for request in list(self._scheduler.requests):  # whoever asked is gone
                self._scheduler.cancel(request)
            self._pipeline.drain()
            self._tier.save_all()
            while self._tier.has_unsaved and time.monotonic() < deadline:
                self._on_turn()
                if self._pipeline.turn() is None and self._pipeline.is_empty:
                    time.sleep(_POLL_SECONDS)  # the drive's queue is full
        except (StepsLost, TrainingFailed) as e:
            log.info("not everything was saved: %s", e)

    def turn(self) -> None:
        """One turn of the loop."""
        self._on_turn()
        if self._opening is not None and self._tier is not None and (opened := self._opening.poll()):
            self._tier.open(*opened)
        self._receive()
        self._work()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_seconds
            self._outbox.append(m.Heartbeat(self.stats()))
        self._flush()

    def _flush(self) -> None:
        started, preempted = self._scheduler.take_events()
        self._outbox += [m.Started(request, at) for request, at in started]
        self._outbox += [m.Preempted(request) for request in preempted]
        if self._outbox or self._freed:
            self._freed = False
            self._send_load()
        if self._outbox:
            self._channel.send(self._outbox)
            self._outbox = []

    def _send_load(self) -> None:
        s, pool = self._scheduler, self._pool
        deferred = self._adapters.num_waiting
        load = m.Load(s.num_running, s.num_waiting + deferred, pool.used_blocks, pool.free_blocks, deferred)
        if load != self._load:
            self._load = load
            self._outbox.append(load)

    def stats(self) -> EngineStats:
        memory = self._memory()
        s, store = self._scheduler, self._adapters.store
        prefixes, tier = s.prefix_counts, self._tier
        drive = self._opening.cache if self._opening is not None else None
        return EngineStats(
            running=s.num_running,
            waiting=s.num_waiting + self._adapters.num_waiting,
            used_blocks=self._pool.used_blocks,
            free_blocks=self._pool.free_blocks,
            cached_blocks=prefixes.blocks,
            prefix_queries=prefixes.queries,
            prefix_hits=prefixes.hits,
            prefix_evictions=prefixes.evictions,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            preemptions=s.preemptions,
            steps=self._pipeline.steps,
            step_failures=self._step_failures,
            step_ms=self._pipeline.step_ms,
            rows=self._pipeline.rows,
            lora_rows=self._pipeline.lora_rows,
            active_memory=memory.active,
            peak_memory=memory.peak,
            kept_memory=memory.kept,
            compiled_steps=memory.compiled_steps,
            resident_adapters=self._slots.residents(),
            loaded_adapters=len(store),
            loaded_adapter_bytes=store.nbytes,
            adapter_evictions=store.evictions,
            adapter_slot_bytes=self._slot_bytes(),
            serving_ms=self._duty.serving_ms,
            training_ms=self._duty.training_ms,
            training_jobs=self._training.jobs,
            step_tokens=tuple(self._pipeline.step_tokens.counts),
            step_tokens_sum=int(self._pipeline.step_tokens.total),
            batch_fill=tuple(self._pipeline.batch_fill),
            prompt_tokens_per_s=self._pipeline.prompt_rate,
            decode_tokens_per_s=self._pipeline.decode_rate,
            disk=drive.stats() if drive is not None else None,
            disk_hit_tokens=tier.hit_tokens if tier is not None else 0,
            disk_unsaved=tier.unsaved if tier is not None else 0,
        )

    @property
    def _is_idle(self) -> bool:
        return self._is_resting and self._adapters.is_idle and not self._training.is_waiting

    @property
    def _is_resting(self) -> bool:
        """Nothing is to be done on the device."""
        saving = self._tier is not None and self._tier.is_saving
        return self._pipeline.is_empty and not (self._scheduler.requests or self._training.has_work or saving)

    # inbox

    def _receive(self) -> None:
        if self._waits:
            wait = _DRIVE_SECONDS
        elif not self._is_resting:
            wait = 0.0
        elif self._adapters.is_loading or self._training.is_waiting:
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
                    self._scheduler.cancel(message.request, message.choice)
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
                case m.Drain():
                    self._draining = True
                    self._training.stop()
                case _:
                    self._training.submit(message)
        if not self._adapters.is_idle:
            arrived = self._adapters.poll()
            self._outbox += arrived.answers
            for ref in arrived.followed:
                self._follow(ref)
            for request in arrived.requests:
                self._schedule(request)
        self._outbox += self._training.answers()

    def _submit(self, request: Request) -> None:
        try:
            if self._draining:
                raise TandemError("the engine is draining", code="engine_unavailable")
            if not self._adapters.admit(request):
                return
        except TandemError as e:
            self._refuse(request, e)
            return
        self._schedule(request)

    def _schedule(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except TandemError as e:
            self._adapters.release(request.id)
            self._refuse(request, e)

    def _follow(self, ref: AdapterRef) -> None:
        self._adapters.follow(ref, self._scheduler.follow(ref))

    def _refuse(self, request: Request, e: TandemError) -> None:
        retryable = not isinstance(e, InvalidRequest)
        self._outbox.append(m.Failed(request.id, e.code or "invalid_value", e.message, e.param, retryable))

    def _release_adapters(self) -> None:
        """Requests that are over no longer hold their adapter."""
        self._adapters.release_ended(self._scheduler.requests)

    # work on the device

    def _work(self) -> None:
        """A step, and a slice before it when learning is due. Gradient work and rows made for training take turns in
        what is learning's."""
        scheduler, training, pipeline = self._scheduler, self._training, self._pipeline
        was_empty = pipeline.is_empty
        self._step(pipeline.catch_up)
        rows = scheduler.has_background
        due = self._duty.may_train(scheduler.has_users, rows or training.has_work)
        if training.has_work and (training.is_brief or (due and not (rows and self._sliced))):
            self._sliced = True
            if pipeline.is_apart:
                self._step(pipeline.drain)
            self._step(lambda: pipeline.turn(False, training.slice, step=not (due and self._duty.may_go_on)))
        else:
            self._sliced = self._sliced and not due  # those rows are in this step only if learning is due
            self._step(lambda: pipeline.turn(due))
        # Nothing was under way, and nothing could be begun.
        idle = was_empty and pipeline.is_empty and not training.has_work
        self._waits = idle and self._tier is not None and self._tier.is_reading
        if self._adapters.has_left:
            self._adapters.let_go(scheduler.digests)

    def _step(self, turn: Callable[[], Settled | None]) -> None:
        """What learning has to say since is sent with the step's tokens."""
        try:
            settled = turn()
        except StepsLost as e:
            self._fail(e)
            return
        except TrainingFailed as e:
            self._outbox += self._training.answers()
            self._strike(f"learning: {e}")
            return
        self._outbox += self._training.answers()
        if settled is None:
            return
        if settled.deltas:
            self._outbox.append(m.Output(settled.deltas))
        for request in settled.failed:
            self._outbox.append(m.Failed(request, "numerical_error", "the model's output was not finite"))
        if settled.failed or any(d.finish for d in settled.deltas):
            self._release_adapters()

    def _fail(self, lost: StepsLost) -> None:
        log.error("a step failed%s: %s", " and is computed again" if lost.again else "", lost)
        self._step_failures += 1
        for request in self._scheduler.fail(lost.plans, again=lost.again):
            self._outbox.append(m.Failed(request, "step_failed", "the step that computed this request failed"))
        self._release_adapters()
        if not lost.again:
            self._strike(str(lost))
        self._runner.reset()

    def _strike(self, what: str) -> None:
        """One failure more; raises EngineFailure when there have been too many."""
        now = time.monotonic()
        self._failures.append(now)
        while now - self._failures[0] > STRIKE_SECONDS:
            self._failures.popleft()
        if len(self._failures) >= STRIKES:
            self._channel.send(self._outbox)
            raise EngineFailure(f"{STRIKES} failures within {STRIKE_SECONDS:.0f} s; the last: {what}")
