"""What is certain to be done before what on a Metal device, however MLX cuts the work into encoders.

MLX encodes dispatches into encoders (`CommandEncoder` in mlx/backend/metal/device.cpp) whose dispatches run
concurrently, over buffers that Metal does not track (`resource_options` in allocator.cpp). Two things order them:

- within an encoder, a barrier for all that came before. `set_input_array` asks for one when an input is an output since
  the last barrier, `register_output_array` when an output is an input since then;
- between encoders, a fence for all of an encoder. `end_encoding` waits for the encoder that last had one of this one's
  inputs as its output. (Outputs are inputs too: `set_output_array` begins with `set_input_array`.)

Where an encoder ends depends on `needs_commit`, on sizes and on what the host waits for, so nothing may rest on two
dispatches being in one. What is left is this: a dispatch comes after the last one that had any of its inputs or outputs
as an output, and after all that comes before that. An output over another's *input* is ordered within an encoder only.
What a kernel writes without having it as an output orders nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ordered:
    """Dispatches by number, in the order in which they are encoded. Sets of them are the bits of an integer."""

    def __init__(self) -> None:
        self.before: list[int] = []  # of each dispatch, what is done when it begins
        self._writer: dict[int, int] = {}  # by buffer: the last dispatch that had it as an output
        self._done = 0  # what the host has waited for

    def dispatch(self, inputs: Iterable[int], outputs: Iterable[int]) -> int:
        """Encode a dispatch with these buffers as its registered inputs and outputs. Returns its number."""
        number, outputs = len(self.before), list(outputs)
        self.before.append(self._done | self.up_to([*inputs, *outputs]))
        self._writer |= dict.fromkeys(outputs, number)
        return number

    def up_to(self, buffers: Iterable[int]) -> int:
        """Return what is done when the last outputs into these buffers are."""
        done = 0
        for buffer in buffers:
            if (writer := self._writer.get(buffer)) is not None:
                done |= self.before[writer] | 1 << writer
        return done

    def wait(self, buffers: Iterable[int]) -> None:
        """Have the host wait for the last outputs into these buffers: what is encoded later comes after them."""
        self._done |= self.up_to(buffers)

    def synchronize(self) -> None:
        """Have the host wait for everything."""
        self._done = (1 << len(self.before)) - 1

    def is_done(self, dispatch: int) -> bool:
        """Whether the host has waited for it."""
        return bool(self._done >> dispatch & 1)

    def comes_after(self, later: int, earlier: int) -> bool:
        return bool(self.before[later] >> earlier & 1)
