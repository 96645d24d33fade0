"""A step that is built before its numbers are known.

Where drafts follow from the newest tokens, a step can be planned only when the device has finished the step before, and
the device waits while the host builds the graph of the next step. That step is often of the same kind and has the same
arrays. So the host builds its graph while the device still computes, with a buffer for the numbers that is filled
later. A step of another kind is built anew. Whoever writes into an argument of a step, `array[i] = x`, has to call
`drop` before: the array stays the same object.

On CUDA such a step can be dispatched as well. The device then waits at its first kernel (`kernels/gate.py`) until the
host has written the numbers. If the next step is of another kind, the host opens the gate, and the device computes the
last step once more, to no effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY, StepPlan
from mlx_tandem.model.step.forward_inputs import ForwardInputs
from mlx_tandem.model.step.inputs import Inputs, Numbers, Sent
from mlx_tandem.model.step.parts import Flight

Arguments = Sequence[Any]
"""The arguments of a step behind its numbers: arrays, or lists of arrays that may contain lists."""

LEAST_USED = 0.5
"""Share of the graphs that has to be used, of late, so that more are built."""

PROBE = 32
"""Number of steps after which one graph is built again although too few were used."""


LONGEST_WAIT = 0.5
"""Seconds between the dispatch of a step that waits for its numbers and the moment when the host has them. It takes
longer only if the host was stopped, or if host and device wait for each other, which the gate ends after a second."""

MOST_STALLS = 3
"""How often that may happen before no more steps are dispatched early."""

log = logging.getLogger(__name__)


class StepCall(NamedTuple):
    """A call of a compiled step.

    Attributes:
        step: The step.
        numbers: The numbers of the call. Those of another call have the same shapes and types.
        arguments: The other arguments.
        room: How many numbers the device writes back, as in `Sent`.
    """

    step: Any
    numbers: Sequence[Numbers]
    arguments: Arguments
    room: int = 0


class RepeatableForward(NamedTuple):
    """A forward that the next step may repeat: its compiled function, its numbers and its inputs."""

    step: Any
    numbers: Sequence[Numbers]
    given: ForwardInputs

    @property
    def can_wait(self) -> bool:
        """Whether it may be dispatched once more before its numbers are known.

        If the next step is another one, the device computes this one with the old numbers. It then writes the same keys
        and values to the same places, unless tokens or places follow from what the device has drawn meanwhile, or
        layers keep states. While it waits, the host can read nothing but the tokens that steps write back. So it may
        not wait if the host has to read logprobs or drafts of the model's head.
        """
        key = self.given.key
        known = all(row.tokens[0] != CARRY and not row.slack for row in self.given.every)
        return known and key.turns is None and key.flags.logprobs < 0 and not key.proposes


class Prebuilt:
    """The graph that was built before its numbers were known, if there is one, and the forward that it repeats.

    Attributes:
        used: The share of the graphs that was used, a moving average.
        dispatched: Whether the results that `results` has returned last are those of a step that was dispatched before.

    Args:
        inputs: The transfer by which the numbers travel.
        dispatch: Dispatches the results of a step; None: no step is dispatched before its numbers are known.
    """

    def __init__(self, inputs: Inputs, dispatch: Callable[[Any], None] | None = None):
        self.used = 1.0
        self.dispatched = False
        self._inputs = inputs
        self._dispatch = dispatch
        self._made: tuple[StepCall, Sent, Any] | None = None
        self._is_ahead = False  # whether that graph has been dispatched
        self._stalls = 0
        self._began = 0.0  # seconds of time.monotonic at which it was
        self._dropped: list[Sent] = []  # the device may not have read them: their steps were dispatched, then dropped
        self._forwards: list[RepeatableForward | None] = []
        self._newest: Flight | None = None
        self._behind: StepPlan | None = None  # the plan behind whose step that graph was built
        self._skipped = 0

    def begin(self) -> None:
        """Start to record the forwards of a step."""
        self._forwards, self._newest = [], None

    def note(self, forward: RepeatableForward | None) -> None:
        """Record a forward of the step; None: one that is not worth repeating."""
        self._forwards.append(forward)

    def end(self, flight: Flight) -> None:
        """Remember that `flight` is the newest step and has the recorded forwards."""
        self._newest = flight

    def take_repeatable(self, flight: Flight) -> RepeatableForward | None:
        """Return the forward that the next step is likely to repeat, and forget it.

        It is None if a later step than `flight` is in flight already, if the step has several forwards, if its only one
        is not worth repeating, or if too few graphs were used of late.
        """
        if flight is not self._newest or len(self._forwards) != 1:
            return None
        (forward,) = self._forwards
        self.begin()
        if self.used < LEAST_USED and self._skipped < PROBE:
            self._skipped += 1
            return None
        self._skipped = 0
        self._behind = flight.plan
        return forward

    def expects(self, plan: StepPlan) -> bool:
        """Return whether the next step may be the one that was built, as far as its plan says.

        The plan has to have rows of the same seats and lengths as the plan before, and nothing else to do.
        """
        others = plan.seatings, plan.uploads, plan.copies, plan.saves, plan.loads, plan.masked, plan.drops, plan.encodes
        return self._behind is not None and not any(others) and _extents(plan) == _extents(self._behind)

    def build(self, call: StepCall, *, dispatches: bool = False) -> None:
        """Build the graph of a call, whose numbers only say what shapes the numbers will have.

        dispatches: whether the step is dispatched as well and waits on the device, which `can_wait` has to allow. Until
        `results` or `drop` is called, nobody may make an array or read one from the device then, since the host might
        wait for the device, which waits for the host.
        """
        self.drop()
        sent = self._inputs.reserve(call.numbers, call.room)
        try:
            self._made = call, sent, call.step(sent.arrays, *call.arguments)
        finally:
            if self._made is None:
                self._inputs.done(sent)
        self._is_ahead = dispatches and self._dispatch is not None
        if self._is_ahead:
            assert self._dispatch is not None
            self._began = time.monotonic()
            self._inputs.write(sent, call.numbers)
            self._dispatch(self._made[2])

    def results(self, call: StepCall) -> tuple[Sent, Any]:
        """Return the numbers of a call as they were sent, and the results of the call.

        The graph that was built before is used if its step and its arguments are the same objects. Otherwise it is
        dropped, and the call is built now.
        """
        self.dispatched = False
        if self._made is not None:
            built, sent, results = self._made
            self._look_for_stall()
            is_same = self._made is not None and built.step is call.step and _same(built.arguments, call.arguments)
            self.used += (is_same - self.used) / 8
            if is_same:
                self._made = None
                self._inputs.fill(sent, call.numbers)
                self.dispatched = self._is_ahead
                return sent, results
            self.drop()
        sent = self._inputs.send(call.numbers, call.room)
        return sent, call.step(sent.arrays, *call.arguments)

    def reset(self) -> None:
        """Forget everything."""
        self.begin()
        self.drop()

    def drop(self) -> None:
        """Forget the graph that was built. If it was dispatched, let the device compute it with the old numbers."""
        if self._made is not None:
            sent, self._made = self._made[1], None
            if not self._is_ahead:
                self._inputs.done(sent)
            else:
                self._inputs.open(sent)
                self._dropped.append(sent)

    def passed(self) -> None:
        """Note that the device has computed a step that was dispatched behind all that were dropped."""
        while self._dropped:
            self._inputs.done(self._dropped.pop())
        self._look_for_stall()

    def _look_for_stall(self) -> None:
        """Drop a step that has waited for its numbers for so long that the gate may have opened by itself."""
        if self._made is not None and self._is_ahead and time.monotonic() - self._began > LONGEST_WAIT:
            self.stalled()

    def stalled(self) -> None:
        """Note that the device has not waited for a step's numbers, or might not have waited."""
        self.drop()
        self._stalls += 1
        if self._stalls == MOST_STALLS:
            self._dispatch = None
            log.warning(
                "steps are no longer dispatched early: the device did not wait for the host %d times", MOST_STALLS
            )


def _extents(plan: StepPlan) -> list[tuple[int, int]]:
    """Return the seat and the number of tokens of each row."""
    return [(row.seat, len(row.tokens)) for row in plan.rows]


def _same(ours: Arguments | mx.array, theirs: Arguments | mx.array) -> bool:
    """Return whether both are one array, or lists of the same arrays.

    The lists of most layers and adapters are the same objects, and are not looked into.
    """
    if ours is theirs:
        return True
    if isinstance(ours, mx.array) or isinstance(theirs, mx.array) or len(ours) != len(theirs):
        return False
    return all(map(_same, ours, theirs))
