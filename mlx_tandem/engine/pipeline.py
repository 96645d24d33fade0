"""Scheduler and runner turned one against the other, one step ahead: the device never waits for the host to decide.

A slice of learning goes behind the step in flight, and the next step behind the slice before anything is read. It is
read when that step is in flight, so that what it took counts in what is decided next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine.duty import Duty
from mlx_tandem.engine.histogram import FILL_PARTS, STEP_TOKENS, Histogram
from mlx_tandem.engine.plan import DeviceError, Runner, StepPlan, StepResult
from mlx_tandem.engine.scheduler import Scheduler, Settled

LATE_SECONDS = 5e-4
"""What takes less to wait for was over before: to read a step takes up to 0.4 ms itself."""

APART_TOKENS = 256
"""Of prompts in a step that is not under way together with a slice: the activations of both would be there at once."""


class StepsLost(Exception):
    """The device failed; these steps will never be settled. `again` as in DeviceError."""

    def __init__(self, plans: list[StepPlan], cause: DeviceError):
        super().__init__(str(cause))
        self.plans = plans
        self.again = cause.again


Wait = Callable[[], None]
"""Blocks until what was launched is done; raises what went wrong with it."""


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    handle: Any
    launched: float


@dataclass(frozen=True, slots=True)
class _Slice:
    wait: Wait
    launched: float


class Pipeline:
    """`duty` is told how long steps and slices took and for whom."""

    def __init__(self, scheduler: Scheduler, runner: Runner, duty: Duty | None = None):
        self._scheduler = scheduler
        self._runner = runner
        self._duty = duty or Duty(DutyConfig())
        self._flight: _Flight | None = None
        self._slice: _Slice | None = None  # before the step in flight, where there is one
        self._failure: Exception | None = None  # of a slice, not raised yet
        self._last_done = 0.0
        self.steps = 0
        self.rows = 0
        self.lora_rows = 0
        self.step_ms = 0.0  # moving average
        self.step_tokens = Histogram(STEP_TOKENS)
        self.batch_fill = [0] * FILL_PARTS
        self.prompt_rate = self.decode_rate = 0.0  # tokens per second of the last step that read prompts, that decoded

    @property
    def is_empty(self) -> bool:
        return self._flight is None and self._slice is None and self._failure is None

    @property
    def is_apart(self) -> bool:
        """Whether the step in flight is to be read before a slice is launched."""
        return self._flight is not None and _is_large(self._flight.plan)

    def turn(
        self, background: bool = True, launch: Callable[[], Wait | None] | None = None, *, step: bool = True
    ) -> Settled | None:
        """Launch a slice of learning, if there is one, and behind it the next step, unless `step` is False; then read
        what was launched before, which ran meanwhile. None when that was no step. All of it is read before a step that
        waits or has many tokens of prompts. `background`: as in `Scheduler.plan`. `launch` returns None where nothing
        is waited for.

        Raises StepsLost, no step is in flight then; what `launch` does, and what `catch_up` does: then none is lost.
        """
        self.catch_up()
        before, slice_ = self._flight, self._slice  # one of them at most
        self._slice = None
        if launch is not None:
            self._slice = self._begin(launch)
        self._flight = plan = result = None
        try:
            plan = self._scheduler.plan(background) if step else None
            # What comes behind a launch that waits would be taken for a part of what was before it.
            sliced = self._slice is not None or slice_ is not None
            apart = plan is not None and (self._runner.waits(plan) or (sliced and _is_large(plan)))
            early = apart or (launch is not None and self._runner.one_at_a_time)
            if early:
                result = self._read(slice_, before)
            if apart:
                self._read_slice(self._slice)
                self._slice = None
            if plan is not None:
                launched = time.perf_counter()
                handle = self._runner.launch(plan)
                if plan.masked:
                    self._runner.sample(handle, self._scheduler.masks(plan))
                self._flight = _Flight(plan, handle, launched)
            if not early:
                result = self._read(slice_, before)
        except DeviceError as e:
            self._flight = None
            raise StepsLost([p for p in (before.plan if before else None, plan) if p is not None], e) from e
        return self._settle(before, result)

    def catch_up(self) -> None:
        """Read a slice that a step was launched behind.

        Raises what the `Wait` of a slice does, also of one that was read in a turn: what that read is not lost.
        """
        if self._flight is not None:
            slice_, self._slice = self._slice, None
            self._read_slice(slice_)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def drain(self) -> Settled | None:
        """Read what is in flight, if anything is, and launch nothing: the device has nothing to do then.

        Raises what `turn` does.
        """
        settled = self.turn(step=False)
        self.catch_up()
        return settled

    def _begin(self, launch: Callable[[], Wait | None]) -> _Slice | None:
        launched = time.perf_counter()
        wait = launch()
        if wait is not None:
            return _Slice(wait, launched)
        self._last_done = time.perf_counter()
        self._duty.note_training((self._last_done - launched) * 1e3)
        return None

    def _read(self, slice_: _Slice | None, flight: _Flight | None) -> StepResult | None:
        """Wait until they are done, and note what they took; the step's result."""
        self._read_slice(slice_)
        return None if flight is None else self._finish(flight)

    def _read_slice(self, slice_: _Slice | None) -> None:
        """What goes wrong is kept for `catch_up`."""
        if slice_ is None:
            return
        try:
            slice_.wait()
        except Exception as e:
            self._failure, self._slice = e, None  # the one behind it belongs to the same work
        self._duty.note_training(self._done(slice_.launched))

    def _finish(self, flight: _Flight) -> StepResult:
        asked = time.perf_counter()
        result = self._runner.wait(flight.handle)
        usual = not result.cold and not result.scores  # these pay for the logits of whole chunks
        # Over before it was asked for, as the host launched a slice and another step meanwhile: the device is at the
        # slice. Of the time of both the step has what such steps take by themselves, the slice what it costs streams.
        behind = self._slice is not None and self._flight is not None
        late = usual and behind and time.perf_counter() - asked < LATE_SECONDS
        ms = self._done(flight.launched, self._scheduler.expected(flight.plan) if late else math.inf)
        self.step_ms = 0.9 * self.step_ms + 0.1 * ms if self.step_ms else ms
        self._account(flight.plan, ms)
        self._count(flight.plan, ms)
        if usual and not late:
            self._scheduler.observe(flight.plan, ms)
        return result

    def _settle(self, flight: _Flight | None, result: StepResult | None) -> Settled | None:
        return None if flight is None or result is None else self._scheduler.settle(flight.plan, result)

    def _done(self, launched: float, most_ms: float = math.inf) -> float:
        """Milliseconds that the device had for what was just read: since its launch, or since what was read before."""
        started = max(launched, self._last_done)
        self._last_done = min(time.perf_counter(), started + most_ms / 1e3)
        return (self._last_done - started) * 1e3

    def _account(self, plan: StepPlan, ms: float) -> None:
        share = plan.background_share
        self._duty.note_serving(ms * (1 - share))
        self._duty.note_training(ms * share)
        self._duty.note_tokens(time.perf_counter() * 1e3, plan.has_streams)

    def _count(self, plan: StepPlan, ms: float) -> None:
        """Note what a step of `ms` milliseconds computed."""
        rows, seats = len(plan.rows), self._scheduler.max_num_seqs
        tokens, chunks = sum(len(r.tokens) for r in plan.rows), plan.prompt_tokens
        self.steps += 1
        self.rows += rows
        self.lora_rows += sum(1 for r in plan.rows if r.slot)
        if rows:
            self.step_tokens.observe(tokens)
            self.batch_fill[(rows * FILL_PARTS - 1) // seats] += 1
        if chunks:
            self.prompt_rate = chunks / max(ms, 1e-3) * 1e3
        if tokens > chunks:
            self.decode_rate = (tokens - chunks) / max(ms, 1e-3) * 1e3


def _is_large(plan: StepPlan) -> bool:
    return plan.prompt_tokens >= APART_TOKENS
