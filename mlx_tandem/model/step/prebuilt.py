"""A step that is built before its numbers are known.

Where drafts follow from the newest tokens, a step can be planned only when the device has finished the step before, and
the device waits while the host builds the graph of the next step. That step is often of the same kind and has the same
arrays. So the host builds its graph while the device still computes, with a buffer for the numbers that is filled
later. A step of another kind is built anew. Whoever writes into an argument of a step, `array[i] = x`, has to call
`drop` before: the array stays the same object.

On CUDA such a step can be dispatched as well. The device then waits at its first kernel (`kernels/exchange.py`) until
the host has written the numbers. If the next step is of another kind, or none comes, the host opens the gate, and the
device repeats the last step, which writes the same values again. So does whoever else needs the device (`Company`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import mlx.core as mx

from mlx_tandem.engine.plan import CARRY, StepPlan
from mlx_tandem.model.inputs import Inputs, Numbers, Sent
from mlx_tandem.model.kernels import inplace
from mlx_tandem.model.step.forward_inputs import ForwardInputs
from mlx_tandem.model.step.parts import Flight

Arguments = Sequence[Any]
"""The arguments of a step behind its numbers: arrays, or lists of arrays that may contain lists."""

LEAST_USED = 0.5
"""Share of the graphs that has to be used, of late, so that more are built."""

LEAST_USED_EARLY = 0.8
"""Share of the graphs that has to be used, of late, so that more are dispatched early. A step that is dispatched and
dropped costs the device a whole step. One that is used saves less than a fifth of a step."""

PROBE = 32
"""Number of steps after which one graph is built again although too few were used."""

LONGEST_WAIT = 0.5
"""Longest time in seconds from the dispatch of a step until the host has its numbers. A longer wait means that the host
was stopped, or that host and device wait for each other. The gate opens by itself after a second."""

MOST_STALLS = 3
"""Number of longer waits after which no step is dispatched early."""

FORGETS_AFTER = 10_000
"""Number of used steps in a row after which earlier long waits are forgotten."""

log = logging.getLogger(__name__)


P = ParamSpec("P")
T = TypeVar("T")


class Company:
    """The users of the device beside the steps of a runner: threads that read adapters or write versions, and learning.

    A step may wait on the device for its numbers. Everything behind it waits, too, and a call of the driver that waits
    for the device may keep Python's lock from the thread that would make the plan. So whoever makes or reads arrays
    beside the steps does it within `with company:`, on any thread. Entering lets a waiting step go on, and none waits
    until all have left.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a pass may be collected as garbage, and closed, while it is held
        self._number = 0
        self._let_go: Callable[[], None] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._number += 1
            let_go, self._let_go = self._let_go, None
            if let_go is not None:
                let_go()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._number -= 1

    def around(self, work: Callable[P, T]) -> Callable[P, T]:
        """Return a function that does `work` in company, on any thread."""

        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            with self:
                return work(*args, **kwargs)

        return within

    # for the runner

    @property
    def waits(self) -> bool:
        """Whether a step waits that nobody has let go."""
        return self._let_go is not None

    def begin_to_wait(self, let_go: Callable[[], None]) -> bool:
        """Note that a step is going to wait until `let_go` is called; return False if it must not, since somebody uses
        the device.
        """
        with self._lock:
            if not self._number:
                self._let_go = let_go
            return not self._number

    def end_to_wait(self) -> bool:
        """Note that the runner itself lets the step go; return False if somebody has done that before."""
        with self._lock:
            let_go, self._let_go = self._let_go, None
            return let_go is not None


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

        If the next step is another one, the device computes this one with the old numbers. A repeated step must write
        the same keys and values to the same places. It does not if tokens or places follow from what the device has
        drawn meanwhile, if layers keep states, or if the model's head writes what follows from draws. While it waits,
        the host can read nothing but the tokens that steps write back. So it may not wait if the host has to read
        logprobs.
        """
        key = self.given.key
        known = all(row.tokens[0] != CARRY and not row.slack for row in self.given.every)
        return known and key.turns is None and key.flags.logprobs < 0 and key.proposes is None


class Prebuilt:
    """The graph that was built before its numbers were known, if there is one, and the forward that it repeats.

    Attributes:
        company: The users of the device beside the steps.
        may_build: Whether graphs are built. All numbers have to travel as one array, which is filled later, and kernels
            have to write the pool: MLX's own writes would copy arrays of the pool that a graph still holds.
        may_dispatch: Whether steps may be dispatched as well. The owner forbids it if anything else needs the device
            each time before a step is planned.
        used: The share of the graphs that was used, a moving average.

    Args:
        inputs: The transfer by which the numbers travel.
        dispatch: Dispatches the results of a step; None: no step is dispatched before its numbers are known.
    """

    def __init__(self, inputs: Inputs, dispatch: Callable[[Any], None] | None = None):
        self.company = Company()
        self.may_build = inputs.packed and inplace.writing().store is not None
        self.may_dispatch = True
        self.used = 1.0
        self._inputs = inputs
        self._dispatch = dispatch
        self._made: tuple[StepCall, Sent, Any] | None = None
        self._is_ahead = False  # whether that graph has been dispatched
        self._began = 0.0  # seconds of time.monotonic at which it was
        self._stalls = 0
        self._used_since_stall = 0
        self._dropped: list[Sent] = []  # buffers of dropped steps that the device may still have to compute
        self._forwards: list[RepeatableForward | None] = []
        self._newest: Flight | None = None
        self._behind: StepPlan | None = None  # the plan behind whose step that graph was built
        self._skipped = 0

    def begin(self, plan: StepPlan) -> None:
        """Start to record the forwards of a plan's step, and drop the graph that was built if it is not for it."""
        if not self.expects(plan):
            self.drop()
        self._forget()

    def _forget(self) -> None:
        """Forget the newest step."""
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
        self._forget()
        if self.used < LEAST_USED and self._skipped < PROBE:
            self._skipped += 1
            return None
        self._skipped = 0
        self._behind = flight.plan
        return forward

    def expects(self, plan: StepPlan) -> bool:
        """Return whether the step that was built may be that of a plan.

        The plan has to have rows like those of the plan before, and nothing else to do.
        """
        others = plan.seatings, plan.uploads, plan.copies, plan.saves, plan.loads, plan.masked, plan.drops, plan.encodes
        return self._behind is not None and not any(others) and _shape(plan) == _shape(self._behind)

    def build(self, call: StepCall, *, dispatches: bool = False) -> None:
        """Build the graph of a call, whose numbers only say what shapes the numbers will have.

        dispatches: whether the step is dispatched as well and waits on the device, if the device can do that, enough
        graphs are used and nobody else uses the device. Its `can_wait` has to allow that. If it is dispatched, no array
        may be made or read until `results` or `drop` is called, because that might wait for the device.
        """
        self.drop()
        sent = self._inputs.reserve(call.numbers, call.room)
        try:
            self._made = call, sent, call.step(sent.arrays, *call.arguments)
        finally:
            if self._made is None:
                self._inputs.done(sent)
        self._is_ahead = (
            dispatches
            and self.may_dispatch
            and call.room > 0
            and self._dispatch is not None
            and self.used >= LEAST_USED_EARLY
            and self.company.begin_to_wait(partial(self._inputs.open, sent))
        )
        if self._is_ahead:
            assert self._dispatch is not None
            self._began = time.monotonic()
            self._inputs.write(sent, call.numbers)
            self._dispatch(self._made[2])
            if self._is_late:  # MLX waits for a step's first graphs before it dispatches many more
                self._stop("dispatching a step waits for the step itself")

    def results(self, call: StepCall) -> tuple[Sent, Any]:
        """Return the numbers of a call as they were sent, and the results of the call.

        The graph that was built before is used if its step and its arguments are the same objects. Otherwise it is
        dropped, and the call is built now.
        """
        if self._made is not None:
            built, sent, results = self._made
            self._look_for_stall()
            is_same = built.step is call.step and _same(built.arguments, call.arguments)
            if self._made is not None and is_same and (not self._is_ahead or self.company.end_to_wait()):
                self._made = None
                self._inputs.fill(sent, call.numbers)
                self._note_use()
                return sent, results
            self.drop()
        sent = self._inputs.send(call.numbers, call.room)
        return sent, call.step(sent.arrays, *call.arguments)

    def reset(self) -> None:
        """Forget everything."""
        self._forget()
        self.drop()

    def drop(self) -> None:
        """Forget the graph that was built. If it was dispatched, let the device compute it with the old numbers."""
        if self._made is not None:
            sent, self._made = self._made[1], None
            self.used -= self.used / 8
            if not self._is_ahead:
                self._inputs.done(sent)
            else:
                self.company.end_to_wait()
                self._inputs.open(sent)
                self._dropped.append(sent)

    def passed(self) -> None:
        """Take back the buffers of dropped steps, since the device has finished a step that was dispatched later."""
        while self._dropped:
            self._inputs.done(self._dropped.pop())
        self._look_for_stall()

    def stalled(self) -> None:
        """Note that the device has not waited for a step's numbers, or might not have waited."""
        self.drop()
        self._stalls += 1
        self._used_since_stall = 0
        if self._stalls == MOST_STALLS:
            self._stop(f"the device did not wait for the host {MOST_STALLS} times")

    @property
    def _is_late(self) -> bool:
        """Whether the gate of the step that was dispatched may have opened by itself."""
        return self._made is not None and self.company.waits and time.monotonic() - self._began > LONGEST_WAIT

    def _look_for_stall(self) -> None:
        """Drop a step that has waited for too long."""
        if self._is_late:
            self.stalled()

    def _note_use(self) -> None:
        """Count a graph that is used."""
        self.used += (1 - self.used) / 8
        self._used_since_stall += 1
        if self._used_since_stall == FORGETS_AFTER:
            self._stalls = 0

    def _stop(self, reason: str) -> None:
        """Dispatch no more steps early."""
        self.drop()
        self._dispatch = None
        log.warning("steps are no longer dispatched before their numbers are known: %s", reason)


def _shape(plan: StepPlan) -> tuple[Any, ...]:
    """Return everything about a plan's rows that decides which arrays their step is given."""
    rows = [(row.kind, row.seat, row.lora_slot, len(row.tokens), row.sample) for row in plan.rows]
    return plan.proposes, rows


def _same(ours: Arguments | mx.array, theirs: Arguments | mx.array) -> bool:
    """Return whether both are one array, or lists of the same arrays.

    The lists of most layers and adapters are the same objects, and are not looked into.
    """
    if ours is theirs:
        return True
    if isinstance(ours, mx.array) or isinstance(theirs, mx.array) or len(ours) != len(theirs):
        return False
    return all(map(_same, ours, theirs))
