"""The queue between parts that are built and the device."""

from __future__ import annotations

from collections import deque

import mlx.core as mx

from mlx_tandem.model import backend, device
from mlx_tandem.model.step.parts import Part

MANY_TOKENS = 64
"""Prompt tokens of a forward from which on its matrix products use every core of a CPU. Those of rows that decode never
do: the host launches the next operations on another core meanwhile."""


class DispatchQueue:
    """The parts of steps on their way to the device, in their order.

    Attributes:
        one_at_a_time: Whether a part is dispatched only when the part before it is done; it is built meanwhile. Where
            MLX's own operations write and operations in flight hold their inputs, a write dispatched behind a read of
            the pool would copy the pool. Whether the device needs this is measured at start (`overlap.py`).
    """

    def __init__(self) -> None:
        self.one_at_a_time = backend.current().steps.one_at_a_time
        self._waiting: deque[Part] = deque()
        self._running: Part | None = None

    def add(self, *parts: Part) -> None:
        """Put parts behind those that wait, and dispatch what can be dispatched."""
        self._waiting.extend(parts)
        self._dispatch()

    def follow(self, part: Part) -> None:
        """Dispatch a part that does not use the pool, behind the waiting ones, whose results it may need."""
        if self._waiting:
            self._waiting.append(part)
        else:
            mx.async_eval(part.marker)

    def done(self, part: Part) -> None:
        """Note that the device has computed a part, and dispatch what waited for that."""
        if part is self._running:
            self._running = None
        self._dispatch()

    def finish(self) -> None:
        """Dispatch all parts and wait until the device has computed them."""
        while self._running is not None:
            mx.eval(self._running.marker)
            mx.synchronize()  # a GPU releases the inputs of operations a little later
            self.done(self._running)

    def clear(self) -> None:
        """Forget all parts."""
        self._waiting.clear()
        self._running = None

    def _dispatch(self) -> None:
        while self._waiting and not (self.one_at_a_time and self._running is not None):
            self._running = self._waiting.popleft()
            if self.one_at_a_time:
                device.blas_threads(every_core=self._running.prompt_tokens >= MANY_TOKENS)
            mx.async_eval(self._running.marker)
