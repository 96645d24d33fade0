"""Scheduler and runner turned one against the other, one step ahead: the device never waits for the host to decide.

A slice of learning takes a step's place: it is launched behind the step in flight and read when the next thing is
launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine.duty import Duty
from mlx_tandem.engine.plan import DeviceError, Runner, StepPlan, StepResult
from mlx_tandem.engine.scheduler import Scheduler, Settled


class StepsLost(Exception):
    """The device failed; these steps will never be settled."""

    def __init__(self, plans: list[StepPlan], cause: DeviceError):
        super().__init__(str(cause))
        self.plans = plans


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
        self._flight: _Flight | _Slice | None = None
        self._last_done = 0.0
        self.steps = 0
        self.rows = 0
        self.lora_rows = 0
        self.step_ms = 0.0  # moving averages
        self._slice_ms = 0.0

    @property
    def is_empty(self) -> bool:
        return self._flight is None

    @property
    def learning_ms(self) -> float:
        """What is under way for learning will take about so long, or longer."""
        return self._slice_ms if isinstance(self._flight, _Slice) else 0.0

    def turn(self, background: bool = True) -> Settled | None:
        """Launch the next step, then read what was launched before, which ran meanwhile. None when that was no step.
        `background`: as in `Scheduler.plan`.

        Raises StepsLost, the pipeline is empty then; and what a slice's `Wait` does.
        """
        previous, self._flight = self._flight, None
        plan = None
        try:
            plan = self._scheduler.plan(background)
            if plan is None:
                return self._read(previous)
            # What comes behind a launch that waits would be taken for a part of what was before it.
            early = self._runner.waits(plan)
            result, failure = None, None
            try:
                result = self._finish(previous) if early else None
            except DeviceError:
                raise
            except Exception as e:  # a slice's; what is planned has to be launched all the same
                failure = e
            launched = time.perf_counter()
            self._flight = _Flight(plan, self._runner.launch(plan), launched)
            if failure is not None:
                raise failure
            return self._settle(previous, result if early else self._finish(previous))
        except DeviceError as e:
            self._flight = None
            before = previous.plan if isinstance(previous, _Flight) else None
            raise StepsLost([p for p in (before, plan) if p is not None], e) from e

    def slice(self, launch: Callable[[], Wait | None]) -> Settled | None:
        """As `turn`, with a slice of learning instead of a step. `launch` returns None where nothing is waited for.

        Raises what `turn` does, and what `launch` does: then a step in flight is still to be read.
        """
        previous, self._flight = self._flight, None
        launched = time.perf_counter()
        try:
            wait = launch()
        except BaseException:
            self._flight = previous if isinstance(previous, _Flight) else None
            raise
        if wait is None:
            self._last_done = time.perf_counter()
            self._duty.note_training((self._last_done - launched) * 1e3)
        else:
            self._flight = _Slice(wait, launched)
        try:
            settled = self._read(previous)
        except DeviceError as e:
            assert isinstance(previous, _Flight)
            raise StepsLost([previous.plan], e) from e
        except BaseException:  # a slice failed: the one behind it belongs to the same work
            self._flight = None
            raise
        return settled

    def drain(self) -> Settled | None:
        """Read what is in flight, if anything is, and launch nothing: the device has nothing to do then.

        Raises what `turn` does.
        """
        previous, self._flight = self._flight, None
        try:
            return self._read(previous)
        except DeviceError as e:
            assert isinstance(previous, _Flight)
            raise StepsLost([previous.plan], e) from e

    def _read(self, flight: _Flight | _Slice | None) -> Settled | None:
        return self._settle(flight, self._finish(flight))

    def _finish(self, flight: _Flight | _Slice | None) -> StepResult | None:
        """Wait until it is done, and note what it took; a step's result."""
        if flight is None:
            return None
        if isinstance(flight, _Slice):
            try:
                flight.wait()
            finally:
                ms = self._done(flight.launched)
                # A slow one is forgotten at once: who is thought slow waits long, and then has much to catch up with.
                self._slice_ms = min(ms, _averaged(self._slice_ms, ms))
                self._duty.note_training(ms)
            return None
        result = self._runner.wait(flight.handle)
        ms = self._done(flight.launched)
        self.step_ms = _averaged(self.step_ms, ms)
        self._account(flight.plan, ms)
        self.steps += 1
        self.rows += len(flight.plan.rows)
        self.lora_rows += sum(1 for r in flight.plan.rows if r.slot)
        if not result.cold and not result.scores:  # these pay for the logits of whole chunks
            self._scheduler.observe(flight.plan, ms)
        return result

    def _settle(self, flight: _Flight | _Slice | None, result: StepResult | None) -> Settled | None:
        if result is None:
            return None
        assert isinstance(flight, _Flight)
        return self._scheduler.settle(flight.plan, result)

    def _done(self, launched: float) -> float:
        """Milliseconds that the device had for what was just read: since its launch, or since what was read before."""
        started, self._last_done = max(launched, self._last_done), time.perf_counter()
        return (self._last_done - started) * 1e3

    def _account(self, plan: StepPlan, ms: float) -> None:
        share = plan.background_share
        self._duty.note_serving(ms * (1 - share))
        self._duty.note_training(ms * share)
        self._duty.note_tokens(self._last_done * 1e3, plan.has_streams)


def _averaged(average: float, ms: float) -> float:
    return 0.9 * average + 0.1 * ms if average else ms
