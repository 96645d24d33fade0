"""Trainers that share the device with steps, some of which wait on it for their numbers (`model/step/prebuilt.py`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone
from mlx_tandem.engine.plan import Wait
from mlx_tandem.engine.trainers import Pause, TrainerBackend
from mlx_tandem.model.step.prebuilt import Company

T = TypeVar("T")


class BesideSteps:
    """A TrainerBackend that does the work of another one in the company of a runner's steps."""

    def __init__(self, trainers: TrainerBackend, company: Company):
        self._trainers, self._company = trainers, company
        self.required_bytes = trainers.required_bytes
        self.open, self.close = company.around(trainers.open), company.around(trainers.close)
        self.settle, self.drop_gradients = company.around(trainers.settle), company.around(trainers.drop_gradients)

    def run(
        self, batches: Sequence[Batch], forward_only: bool, micro_batch_tokens: int
    ) -> Generator[Wait, None, tuple[BatchResult, ...]]:
        """Run a pass."""
        with self._company:
            return self._slices(self._trainers.run(batches, forward_only, micro_batch_tokens))

    def step(self, name: str, adam: AdamParams, more: bool) -> Generator[Wait, None, StepDone]:
        """Take one step of the optimiser."""
        with self._company:
            return self._slices(self._trainers.step(name, adam, more))

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        """Copy the present weights, and return what makes an adapter of them."""
        with self._company:
            return self._company.around(self._trainers.publish(name))

    def snapshot(self, name: str, optimizer: bool) -> Callable[[str], None]:
        """Copy the present state, and return what writes it."""
        with self._company:
            return self._company.around(self._trainers.snapshot(name, optimizer))

    def _slices(self, slices: Generator[Wait, None, T]) -> Generator[Wait, None, T]:
        """Yield slices that are launched and waited for in company."""
        try:
            while True:
                with self._company:
                    try:
                        wait = next(slices)
                    except StopIteration as e:
                        result: T = e.value
                        return result
                yield wait if isinstance(wait, Pause) else self._company.around(wait)
        finally:
            with self._company:
                slices.close()
