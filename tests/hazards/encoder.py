"""MLX's command encoder as a machine: the sets, barriers and fences of `CommandEncoder` in
mlx/backend/metal/device.cpp, with what they order instead of a device."""

from __future__ import annotations

from collections.abc import Iterable


class Encoders:
    """All encoders of one queue. `end` may be called between any two dispatches, as `needs_commit` decides in MLX."""

    def __init__(self) -> None:
        self.before: list[int] = []  # of each dispatch, what is done when it begins; final once its encoder has ended
        self._last_fence: dict[
            int, int
        ] = {}  # `prev_ce_outputs_`: by buffer, the encoder that last had it as an output
        self._encoders: list[int] = []  # by encoder: its dispatches and all that it waited for
        self._begin()

    def _begin(self) -> None:
        self._first = len(self.before)
        self._passed = 0  # the encoder's dispatches before its last barrier
        self._all_inputs: set[int] = set()
        self._all_outputs: set[int] = set()
        self._previous_inputs: set[int] = set()  # since the last barrier
        self._previous_outputs: set[int] = set()

    def dispatch(self, inputs: Iterable[int], outputs: Iterable[int]) -> None:
        """`set_input_array` and `set_output_array` for each, then `dispatch_threads`."""
        inputs, outputs = set(inputs) | set(outputs), set(outputs)
        self._all_inputs |= inputs
        self._all_outputs |= outputs
        if inputs & self._previous_outputs or outputs & self._previous_inputs:  # `maybeInsertBarrier`
            self._passed = (1 << len(self.before)) - (1 << self._first)
            self._previous_inputs, self._previous_outputs = inputs, outputs
        else:
            self._previous_inputs |= inputs
            self._previous_outputs |= outputs
        self.before.append(self._passed)

    def end(self) -> None:
        """`end_encoding`: wait for fences before all of the encoder, and leave one behind it."""
        waited = 0
        for buffer in self._all_inputs & self._last_fence.keys():
            waited |= self._encoders[self._last_fence[buffer]]
        own = 0
        for dispatch in range(self._first, len(self.before)):
            self.before[dispatch] |= waited
            own |= 1 << dispatch
        self._last_fence |= dict.fromkeys(self._all_outputs, len(self._encoders))
        self._encoders.append(own | waited)
        self._begin()
