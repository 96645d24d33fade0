"""Scheduler and runner turned one against the other, one step ahead: the device never waits for the host to decide."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from mlx_tandem.config import DutyConfig
from mlx_tandem.engine.duty import Duty
from mlx_tandem.engine.plan import DeviceError, Runner, StepPlan
from mlx_tandem.engine.scheduler import Scheduler, Settled


class StepsLost(Exception):
    """The device failed; these steps will never be settled."""

    def __init__(self, plans: list[StepPlan], cause: DeviceError):
        super().__init__(str(cause))
        self.plans = plans


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    handle: Any
    launched: float


class Pipeline:
    """`duty` is told how long steps took and for whom."""

    def __init__(self, scheduler: Scheduler, runner: Runner, duty: Duty | None = None):
        self._scheduler = scheduler
        self._runner = runner
        self._duty = duty or Duty(DutyConfig())
        self._flight: _Flight | None = None
        self._last_done = 0.0
        self.steps = 0
        self.rows = 0
        self.lora_rows = 0
        self.step_ms = 0.0  # moving average

    @property
    def is_empty(self) -> bool:
        return self._flight is None

    def turn(self, background: bool = True) -> Settled | None:
        """Launch the next step, then read the one before, which ran meanwhile. None when there was none to read.
        `background`: as in `Scheduler.plan`.

        Raises StepsLost; the pipeline is empty then.
        """
        previous, self._flight = self._flight, None
        plan = None
        try:
            plan = self._scheduler.plan(background)
            if plan is not None:
                launched = time.perf_counter()
                self._flight = _Flight(plan, self._runner.launch(plan), launched)
            return self._settle(previous) if previous is not None else None
        except DeviceError as e:
            self._flight = None
            raise StepsLost([p for p in (previous.plan if previous else None, plan) if p is not None], e) from e

    def drain(self) -> Settled | None:
        """Read the step in flight, if there is one, and launch none: the device has nothing to do then.

        Raises StepsLost.
        """
        previous, self._flight = self._flight, None
        try:
            return self._settle(previous) if previous is not None else None
        except DeviceError as e:
            assert previous is not None
            raise StepsLost([previous.plan], e) from e

    def _settle(self, flight: _Flight) -> Settled:
        result = self._runner.wait(flight.handle)
        done = time.perf_counter()
        ms = (done - max(flight.launched, self._last_done)) * 1e3
        self._last_done = done
        self.step_ms = 0.9 * self.step_ms + 0.1 * ms if self.step_ms else ms
        self._account(flight.plan, ms, done * 1e3)
        self.steps += 1
        self.rows += len(flight.plan.rows)
        self.lora_rows += sum(1 for r in flight.plan.rows if r.slot)
        if not result.cold and not result.scores:  # these pay for the logits of whole chunks
            self._scheduler.observe(flight.plan, ms)
        return self._scheduler.settle(flight.plan, result)

    def _account(self, plan: StepPlan, ms: float, now_ms: float) -> None:
        share = plan.background_share
        self._duty.note_serving(ms * (1 - share))
        self._duty.note_training(ms * share)
        self._duty.note_tokens(now_ms, plan.has_streams)
