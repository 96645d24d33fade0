"""Trainers that share the device with steps, some of which wait on it for their numbers (`model/step/company.py`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine.learning import AdamParams, Batch, BatchResult, StepDone, TrainerInfo, TrainerSpec
from mlx_tandem.engine.plan import Wait
from mlx_tandem.engine.trainers import PAUSE, TrainerBackend
from mlx_tandem.model.step.company import Company

T = TypeVar("T")


class BesideSteps:
    """A TrainerBackend that does the work of another one in the company of a runner's steps."""

    def __init__(self, trainers: TrainerBackend, company: Company):
        self._trainers = trainers
        self._company = company

    def required_bytes(self, spec: TrainerSpec, folder: str) -> int:
        """Return how many bytes the trainer would hold; nothing is computed."""
        return self._trainers.required_bytes(spec, folder)

    def open(self, spec: TrainerSpec, folder: str, weights: AdapterWeights | None) -> TrainerInfo:
        """Make a trainer."""
        with self._company:
            return self._trainers.open(spec, folder, weights)

    def close(self, name: str) -> None:
        """Forget a trainer."""
        with self._company:
            self._trainers.close(name)

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

    def settle(self, name: str, keep: bool) -> None:
        """Keep the last step of the optimiser, or take it back."""
        with self._company:
            self._trainers.settle(name, keep)

    def publish(self, name: str) -> Callable[[], AdapterWeights]:
        """Copy the present weights, and return what makes an adapter of them."""
        with self._company:
            return self._company.around(self._trainers.publish(name))

    def snapshot(self, name: str) -> Callable[[str], None]:
        """Copy the present state, and return what writes it."""
        with self._company:
            return self._company.around(self._trainers.snapshot(name))

    def drop_gradients(self, name: str) -> None:
        """Forget the gradients of a trainer."""
        with self._company:
            self._trainers.drop_gradients(name)

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
                yield wait if wait is PAUSE else self._company.around(wait)
        finally:
            with self._company:
                slices.close()
