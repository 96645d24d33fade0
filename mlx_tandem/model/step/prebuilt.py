"""A step that is built before its numbers are known.

Where drafts follow from the newest tokens, a step can be planned only when the device has finished the step before, and
the device waits while the host builds the graph of the next step. That step is mostly of the same kind and has the same
arrays. So the host builds its graph while the device still computes, with a buffer for the numbers that is filled
later. A step of another kind is built anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_tandem.model.step.forward_inputs import ForwardInputs
from mlx_tandem.model.step.inputs import Inputs, Numbers, Sent
from mlx_tandem.model.step.parts import Flight

Arguments = Sequence[Any]
"""The arguments of a step behind its numbers: arrays, or lists of arrays that may contain lists."""


class Call(NamedTuple):
    """A call of a compiled step.

    Attributes:
        step: The step.
        numbers: The numbers of the call. Those of another call have the same shapes and types.
        arguments: The other arguments.
    """

    step: Any
    numbers: Sequence[Numbers]
    arguments: Arguments


class OneForward(NamedTuple):
    """A forward of a step: its compiled function, its numbers and its inputs."""

    step: Any
    numbers: Sequence[Numbers]
    given: ForwardInputs


class Prebuilt:
    """The step that was built before its numbers were known, if there is one, and the step that it would repeat."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs
        self._made: tuple[Call, Sent, Any] | None = None
        self._forwards: list[OneForward | None] = []
        self._newest: Flight | None = None

    def begin(self) -> None:
        """Note that a step is launched."""
        self._forwards, self._newest = [], None

    def note(self, forward: OneForward | None) -> None:
        """Note a forward of the step that is launched; None: one that is not worth repeating."""
        self._forwards.append(forward)

    def end(self, flight: Flight) -> None:
        """Note that this step has been launched."""
        self._newest = flight

    def repeated(self, flight: Flight) -> OneForward | None:
        """Return the forward that the next step is likely to repeat when the host waits for `flight`.

        None if another step was launched behind it, so that the device has something to do, and if it has several
        forwards or one that is not worth repeating.
        """
        if flight is not self._newest or len(self._forwards) != 1:
            return None
        (forward,) = self._forwards
        self.begin()
        return forward

    def build(self, call: Call) -> None:
        """Build a call, whose numbers only say what shapes the numbers will have."""
        self.drop()
        sent = self._inputs.reserve(call.numbers)
        self._made = call, sent, call.step(sent.arrays, *call.arguments)

    def results(self, call: Call) -> tuple[Sent, Any]:
        """Return what was sent for a call and its results; they are built now unless they were built before."""
        if self._made is not None:
            built, sent, results = self._made
            if built.step is call.step and _same(built.arguments, call.arguments):
                self._made = None
                self._inputs.fill(sent, call.numbers)
                return sent, results
            self.drop()
        sent = self._inputs.send(call.numbers)
        return sent, call.step(sent.arrays, *call.arguments)

    def reset(self) -> None:
        """Forget everything."""
        self.begin()
        self.drop()

    def drop(self) -> None:
        """Forget the step that was built."""
        if self._made is not None:
            self._inputs.done(self._made[1])
            self._made = None


def _same(ours: Arguments, theirs: Arguments) -> bool:
    """Return whether both are made of the same arrays."""
    return [id(array) for array in _arrays(ours)] == [id(array) for array in _arrays(theirs)]


def _arrays(arguments: Arguments) -> Iterator[mx.array]:
    for each in arguments:
        if isinstance(each, mx.array):
            yield each
        else:
            yield from _arrays(each)
