"""The pipeline: it launches steps and slices of learning one step ahead, so that the device never waits.

A slice is launched behind the step in flight, and the next step behind the slice, before anything is read. A slice is
read when that next step is in flight, so that the slice's time counts for the next decision.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from mlx_tandem.engine.histogram import FILL_PARTS, STEP_TOKENS, Histogram
from mlx_tandem.engine.outcome import StepOutcome
from mlx_tandem.engine.plan import DeviceError, Runner, Slice, StepPlan, StepResult, Wait
from mlx_tandem.engine.scheduler import Scheduler
from mlx_tandem.engine.time_share import TimeShare
from mlx_tandem.engine.trainers import TrainerHost

LATE_SECONDS = 5e-4
"""A shorter wait means that the step had already finished when we asked: to read a step takes up to 0.4 ms itself."""

APART_TOKENS = 256
"""Prompt tokens from which on a step is never in flight together with a slice, since the activations of both would be
in memory at once.
"""

_NO_STEP = StepPlan(())


class StepsLost(Exception):
    """Raised when the device failed and some steps will have no result.

    Attributes:
        plans: The plans of these steps.
        again: As in the DeviceError.
        outcome: The outcome of a step that had been read before in the same turn, if there was one.
    """

    def __init__(self, plans: list[StepPlan], cause: DeviceError, outcome: StepOutcome | None = None):
        super().__init__(str(cause))
        self.plans = plans
        self.again = cause.again
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and not read yet."""

    plan: StepPlan
    handle: Any
    launched: float  # seconds of time.perf_counter
    is_undrawn: bool = False  # its masked rows have not drawn yet
    masks: Future[Any] | None = None  # made on another thread; None: not made yet


@dataclass(frozen=True, slots=True)
class _LaunchedSlice:
    """A slice of learning that was launched and not waited for yet."""

    slice: Slice
    wait: Wait
    launched: float  # seconds of time.perf_counter


class StepCounts:
    """Counters of the steps since the start, and their speed."""

    def __init__(self) -> None:
        self.steps = 0
        self.rows = 0
        self.lora_rows = 0
        self.step_ms = 0.0  # moving average
        self.step_tokens = Histogram(STEP_TOKENS)
        self.batch_fill = [0] * FILL_PARTS
        self.prompt_rate = 0.0  # tokens per second of the last step that read prompts
        self.decode_rate = 0.0  # tokens per second of the last step that decoded

    def note(self, plan: StepPlan, ms: float, seats: int) -> None:
        """Count a step that took `ms` milliseconds; at most `seats` rows could have run in it."""
        rows = len(plan.rows)
        tokens, chunks = sum(len(r.tokens) for r in plan.rows), plan.prompt_tokens
        self.steps += 1
        self.rows += rows
        self.lora_rows += sum(1 for r in plan.rows if r.lora_slot)
        self.step_ms = 0.9 * self.step_ms + 0.1 * ms if self.step_ms else ms
        if rows:
            self.step_tokens.observe(tokens)
            self.batch_fill[(rows * FILL_PARTS - 1) // seats] += 1
        if chunks:
            self.prompt_rate = chunks / max(ms, 1e-3) * 1e3
        if tokens > chunks:
            self.decode_rate = (tokens - chunks) / max(ms, 1e-3) * 1e3


class Pipeline:
    """The work in flight on the device, and the decision what is launched next."""

    def __init__(self, scheduler: Scheduler, runner: Runner, time_share: TimeShare, trainers: TrainerHost):
        """Create an empty pipeline. `time_share` is told how long steps and slices took and decides who goes next."""
        self.scheduler = scheduler
        self.runner = runner
        self.time_share = time_share
        self.trainers = trainers
        self.counts = StepCounts()
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="tandem-masks")
        self._flight: _Flight | None = None
        self._slice: _LaunchedSlice | None = None  # before the step in flight, where there is one
        self._last_done = 0.0  # seconds of time.perf_counter
        self._rests = True  # whether the last plan that the runner was given is empty
        self._had_slice = False  # whether learning's last turn was a slice, not rows made for training

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight, and the runner knows that no step comes next."""
        return self._rests and self._flight is None and self._slice is None

    def turn(self) -> StepOutcome | None:
        """Catch up, plan, launch, and read the step before; return its outcome, None when no step was read.

        One or several slices of learning run between two steps when learning is due. Raises StepsLost; no step is in
        flight then.
        """
        self._catch_up()
        wants = self.scheduler.has_background or self.trainers.has_work
        due = self.time_share.may_train(self.scheduler.has_users, wants)
        slice_ = self._next_slice(due)
        if slice_ is None:
            return self._launch(self.scheduler.plan(background=due))
        outcome = None
        if self._flight is not None and _is_large(self._flight.plan):
            outcome = self.drain()
        step = None
        if not (due and self.time_share.may_go_on):  # otherwise another slice follows this one at once
            step = self.scheduler.plan(background=False)
        try:
            return self._launch(replace(step or _NO_STEP, slice=slice_)) or outcome
        except StepsLost as lost:
            lost.outcome = lost.outcome or outcome
            raise

    def _next_slice(self, due: bool) -> Slice | None:
        """Return the slice of learning to launch now, None for a step alone. `due`: whether it is learning's turn.

        Brief slices are always launched. When both slices and rows made for training wait, learning's turns go to them
        alternately.
        """
        slice_ = self.trainers.next_slice()
        rows_first = self._had_slice and self.scheduler.has_background
        if slice_ is not None and (slice_.is_brief or (due and not rows_first)):
            self._had_slice = True
            return slice_
        if due:
            self._had_slice = False
        return None

    def drain(self) -> StepOutcome | None:
        """Read everything in flight and launch nothing, so that the device has nothing to do. Raises StepsLost."""
        self._catch_up()
        outcome = self._launch(None)
        self.rest()
        return outcome

    def rest(self) -> None:
        """Tell the runner that no step comes next, unless it knows or a step is in flight."""
        if not self._rests and self._flight is None:
            self._rests = True
            self.runner.launch(_NO_STEP)

    def _catch_up(self) -> None:
        """Let the rows draw that wait for masks, and read a slice behind which a step has been launched."""
        if self._flight is not None:
            self._sample(self._flight)
            slice_, self._slice = self._slice, None
            self._read_slice(slice_)

    def _sample(self, flight: _Flight) -> None:
        """Let the masked rows of the step in flight draw. The step before has been read, so all tokens are known."""
        if not flight.is_undrawn:
            return
        self._flight = None
        try:
            early = flight.masks
            masks = self.runner.place(self.scheduler.masks(flight.plan)) if early is None else early.result()
            self.runner.sample(flight.handle, masks)
        except DeviceError as e:
            raise StepsLost([flight.plan], e) from e
        self._flight = replace(flight, is_undrawn=False)

    def _launch(self, plan: StepPlan | None) -> StepOutcome | None:
        """Launch a plan's slice and its step, then read the step before, which ran meanwhile; return its outcome.

        The step before is read first where the next step could not start earlier, or where its launch would wait for
        the device itself.
        """
        before, slice_before = self._flight, self._slice  # at most one of the two is not None
        self._flight = self._slice = result = None
        has_step = plan is not None and plan.has_step
        if before is not None or has_step:
            self._rests = False
        else:
            self.rest()
        if plan is not None and plan.slice is not None:
            self._slice = self._launch_slice(plan.slice)
        try:
            sliced = self._slice is not None or slice_before is not None
            apart = has_step and plan is not None and (self.runner.launch_waits(plan) or (sliced and _is_large(plan)))
            early = apart or (plan is not None and plan.slice is not None and self.runner.one_at_a_time)
            if early:
                result = self._read(slice_before, before)
            if apart:
                self._read_slice(self._slice)
                self._slice = None
            if has_step and plan is not None:
                launched = time.perf_counter()
                handle, masks = self._launch_step(plan, None if early else before)
                self._flight = _Flight(plan, handle, launched, bool(plan.masked), masks)
            if not early:
                result = self._read(slice_before, before)
        except DeviceError as e:
            self._flight = None
            outcome = None
            if before is not None and result is not None:  # it was read before the launch that failed
                outcome, before = self.scheduler.update_from_output(before.plan, result), None
            plans = [p for p in (before.plan if before else None, plan) if p is not None]
            raise StepsLost(plans, e, outcome) from e
        return None if before is None or result is None else self.scheduler.update_from_output(before.plan, result)

    def _launch_step(self, plan: StepPlan, before: _Flight | None) -> tuple[Any, Future[Any] | None]:
        """Launch a step; return its handle, and its masks if another thread has made them meanwhile.

        On a GPU, building a step holds Python's global lock; its dispatch, which takes milliseconds, does not. So a
        thread makes the masks during the dispatch. They depend on the tokens of the step `before`. If steps run one at
        a time, these are not known during the launch, and no thread is used.
        """
        begun: list[Future[Any]] = []

        def make() -> Any:
            assert before is not None
            tokens = self.runner.drawn(before.handle)
            drawn = {row.sequence: new for row, new in zip(before.plan.rows, tokens, strict=True) if new}
            return self.runner.place(self.scheduler.masks(plan, drawn))

        def begin() -> None:
            begun.append(self._mask_thread.submit(make))

        overlaps = bool(plan.masked) and before is not None and not self.runner.one_at_a_time
        try:
            handle = self.runner.launch(plan, begin) if overlaps else self.runner.launch(plan)
        finally:
            for masks in begun:
                masks.exception()  # wait for the thread; the error is raised where the masks are used
        return handle, begun[0] if begun else None

    def _launch_slice(self, slice_: Slice) -> _LaunchedSlice | None:
        """Launch a slice and return it; None when it is done already."""
        launched = time.perf_counter()
        wait = self.trainers.launch(slice_)
        if wait is not None:
            return _LaunchedSlice(slice_, wait, launched)
        self._last_done = time.perf_counter()
        self._charge(slice_, (self._last_done - launched) * 1e3)
        return None

    def _read(self, slice_: _LaunchedSlice | None, flight: _Flight | None) -> StepResult | None:
        """Wait until a slice and a step are done, note how long they took, and return the step's result."""
        self._read_slice(slice_)
        return None if flight is None else self._read_step(flight)

    def _read_slice(self, slice_: _LaunchedSlice | None) -> None:
        """Wait until a slice is done, and note how long it took."""
        if slice_ is not None:
            slice_.wait()
            self._charge(slice_.slice, self._done(slice_.launched))

    def _charge(self, slice_: Slice, ms: float) -> None:
        """Note that a slice took so many milliseconds of the device."""
        self.time_share.note_training(ms)
        self.trainers.charge(slice_, ms)

    def _read_step(self, flight: _Flight) -> StepResult:
        """Wait until a step is done, note how long it took, and return its result."""
        asked = time.perf_counter()
        result = self.runner.wait(flight.handle)
        # Steps with scores compute the logits of whole chunks.
        usual = not (result.first_use or result.scores or flight.plan.encodes)
        # The host launched a slice and another step meanwhile. If this step had already finished when it was asked for,
        # the device is working on the slice. Then this step is charged what such steps take alone, and the slice is
        # charged the rest, which is the delay that streams notice.
        behind = self._slice is not None and self._flight is not None
        late = usual and behind and time.perf_counter() - asked < LATE_SECONDS
        ms = self._done(flight.launched, self.scheduler.prefill.cost.expected(flight.plan) if late else math.inf)
        share = flight.plan.background_share
        self.time_share.note_serving(ms * (1 - share))
        self.time_share.note_training(ms * share)
        self.time_share.note_tokens(time.perf_counter() * 1e3, flight.plan.has_streams)
        self.counts.note(flight.plan, ms, self.scheduler.max_num_seqs)
        if usual and not late:
            self.scheduler.prefill.cost.observe_step(flight.plan, ms)
        return result

    def _done(self, launched: float, most_ms: float = math.inf) -> float:
        """Return the milliseconds that the device had for the work just read, at most `most_ms`.

        They count from its launch, or from the end of the work that was read before it if that was later.
        """
        started = max(launched, self._last_done)
        self._last_done = min(time.perf_counter(), started + most_ms / 1e3)
        return (self._last_done - started) * 1e3


def _is_large(plan: StepPlan) -> bool:
    """Return whether a step may not be in flight together with a slice."""
    return plan.prompt_tokens >= APART_TOKENS
