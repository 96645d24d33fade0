"""The engine's loop: drain the inbox, plan, launch, and while that runs, settle the step before.

One thread turns it and nothing else touches the device. Errors are contained: a bad request fails alone, a failed step
fails its rows, and three failed steps in a minute or a broken invariant end the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.adapters.slots import SlotTable
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.pipeline import Pipeline, StepsLost
from mlx_tandem.engine.plan import Runner
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import InvalidRequest, ModelError, TandemError
from mlx_tandem.kv.pool import BlockPool
from mlx_tandem.types import EngineStats

log = logging.getLogger(__name__)

STRIKES = 3
STRIKE_SECONDS = 60.0
_LOADING_WAIT = 0.005


class EngineFailure(Exception):
    """The engine cannot go on."""


@dataclass(slots=True)
class Adapters:
    """The versions the engine holds in memory, by digest, and who still needs them."""

    weights: dict[str, AdapterWeights]  # shared with the runner, which uploads from it
    users: Counter[str] = field(default_factory=Counter)  # open requests
    doomed: set[str] = field(default_factory=set)  # unloaded while in use


class EngineCore:
    def __init__(
        self,
        channel: EngineChannel,
        runner: Runner,
        scheduler: Scheduler,
        pool: BlockPool,
        slots: SlotTable,
        weights: dict[str, AdapterWeights],
        read_adapter: Callable[[Path], AdapterWeights],
        *,
        heartbeat_seconds: float,
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
        on_turn: Callable[[], None] = lambda: None,
    ):
        self._channel = channel
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._slots = slots
        self._adapters = Adapters(weights)
        self._read_adapter = read_adapter
        self._heartbeat_seconds = heartbeat_seconds
        self._memory = memory
        self._on_turn = on_turn
        self._pipeline = Pipeline(scheduler, runner)
        self._outbox: list[m.Outbound] = []
        self._loading = 0
        self._loaded: SimpleQueue[tuple[int, AdapterWeights | TandemError]] = SimpleQueue()
        self._request_adapters: dict[int, str] = {}
        self._failures: deque[float] = deque()
        self._next_heartbeat = 0.0
        self._draining = False
        self._step_failures = 0

    def run(self) -> None:
        """Turn until drained or the front is gone. Raises EngineFailure when the engine must end."""
        try:
            while not (self._draining and self._is_idle):
                self.turn()
        except WireError as e:
            log.info("engine ends: %s", e)

    def turn(self) -> None:
        """One turn of the loop."""
        self._on_turn()
        self._receive()
        self._step()
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_seconds
            self._outbox.append(m.Heartbeat(self.stats()))
        if self._outbox:
            self._channel.send(self._outbox)
            self._outbox = []

    def stats(self) -> EngineStats:
        active, peak = self._memory()
        s = self._scheduler
        return EngineStats(
            running=s.num_running,
            waiting=s.num_waiting,
            used_blocks=self._pool.used_blocks,
            free_blocks=self._pool.free_blocks,
            prompt_tokens=s.prompt_tokens,
            generated_tokens=s.generated_tokens,
            preemptions=s.preemptions,
            steps=self._pipeline.steps,
            step_failures=self._step_failures,
            step_ms=self._pipeline.step_ms,
            rows=self._pipeline.rows,
            lora_rows=self._pipeline.lora_rows,
            active_memory=active,
            peak_memory=peak,
            resident_adapters=self._slots.residents(),
        )

    @property
    def _is_idle(self) -> bool:
        return self._pipeline.is_empty and not self._scheduler.requests and not self._loading

    # inbox

    def _receive(self) -> None:
        if not self._pipeline.is_empty or self._scheduler.requests:
            wait = 0.0
        else:
            wait = _LOADING_WAIT if self._loading else max(self._next_heartbeat - time.monotonic(), 0.0)
        for message in self._channel.receive(wait):
            match message:
                case m.Submit():
                    self._submit(message)
                case m.Cancel():
                    self._scheduler.cancel(message.request, message.choice)
                    self._forget_ended()
                case m.LoadAdapter():
                    self._loading += 1
                    threading.Thread(target=self._load, args=(message,), daemon=True).start()
                case m.UnloadAdapter():
                    self._unload(message)
                case m.Drain():
                    self._draining = True
        while self._loading:
            try:
                call, result = self._loaded.get_nowait()
            except Empty:
                break
            self._loading -= 1
            if isinstance(result, TandemError):
                code = result.code or "invalid_value"
                self._outbox.append(m.CallFailed(call, code, result.message, result.param))
            else:
                digest = result.info.digest
                self._adapters.weights[digest] = result
                self._adapters.doomed.discard(digest)
                self._outbox.append(m.AdapterLoaded(call, result.info))

    def _submit(self, message: m.Submit) -> None:
        request = message.request
        digest = request.adapter.digest if request.adapter else None
        try:
            if self._draining:
                raise TandemError("the engine is draining", code="engine_unavailable")
            if digest is not None and digest not in self._adapters.weights:
                raise InvalidRequest("this adapter version is not loaded", param="model", code="model_not_found")
            self._scheduler.add(request)
        except TandemError as e:
            retryable = not isinstance(e, InvalidRequest)
            self._outbox.append(m.Failed(request.id, e.code or "invalid_value", e.message, e.param, retryable))
            return
        if digest is not None:
            self._adapters.users[digest] += 1
            self._request_adapters[request.id] = digest

    def _load(self, message: m.LoadAdapter) -> None:
        """On its own thread: reading and checking a folder must not hold a step up."""
        result: AdapterWeights | TandemError
        try:
            result = self._read_adapter(Path(message.path))
        except TandemError as e:
            result = e
        except Exception as e:
            log.exception("an adapter could not be read")
            result = ModelError(f"the adapter folder cannot be read: {type(e).__name__}")
        self._loaded.put((message.call, result))

    def _unload(self, message: m.UnloadAdapter) -> None:
        self._adapters.doomed.add(message.digest)
        self._drop_doomed()
        self._outbox.append(m.CallDone(message.call))

    def _forget_ended(self) -> None:
        """Requests that are over no longer hold their adapter."""
        open_requests = self._scheduler.requests
        for request in [r for r in self._request_adapters if r not in open_requests]:
            self._adapters.users[self._request_adapters.pop(request)] -= 1
        if self._adapters.doomed:
            self._drop_doomed()

    def _drop_doomed(self) -> None:
        for digest in [d for d in self._adapters.doomed if self._adapters.users[d] <= 0]:
            self._adapters.doomed.discard(digest)
            self._adapters.weights.pop(digest, None)
            self._slots.forget(digest)

    # steps

    def _step(self) -> None:
        try:
            settled = self._pipeline.turn()
        except StepsLost as e:
            self._fail(e)
            return
        if settled is None:
            return
        if settled.deltas:
            self._outbox.append(m.Output(settled.deltas))
        for request in settled.failed:
            self._outbox.append(m.Failed(request, "numerical_error", "the model's output was not finite"))
        if settled.failed or any(d.finish for d in settled.deltas):
            self._forget_ended()

    def _fail(self, lost: StepsLost) -> None:
        log.error("a step failed: %s", lost)
        self._step_failures += 1
        for request in self._scheduler.fail(lost.plans):
            self._outbox.append(m.Failed(request, "step_failed", "the step that computed this request failed"))
        self._forget_ended()
        now = time.monotonic()
        self._failures.append(now)
        while now - self._failures[0] > STRIKE_SECONDS:
            self._failures.popleft()
        if len(self._failures) >= STRIKES:
            self._channel.send(self._outbox)
            raise EngineFailure(f"{STRIKES} steps failed within {STRIKE_SECONDS:.0f} s; the last: {lost}")
        self._runner.reset()
