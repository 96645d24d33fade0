"""The progress of one update: the share of its computing that is done, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mlx_tandem.engine.learning import Datum
from mlx_tandem.training.store.records import Began

BACKWARD = 3
"""Work for a token in a pass with gradients, relative to that in a pass without."""


class Progress:
    """Counts the tokens that go through the model for an update, those of passes with gradients BACKWARD times."""

    def __init__(self, began: Began, guarded: Sequence[Sequence[Datum]]) -> None:
        """Begin with nothing done. `guarded` are the data of each batch by which movement is measured afterwards."""
        batches = [batch.data for batch in began.batches]
        self._whole = sum(BACKWARD * began.steps * _tokens(data) for data in batches) + sum(map(_tokens, guarded))
        self._done = self._passing = 0
        self._began = time.monotonic()

    @contextmanager
    def passing(self, data: Sequence[Datum], *, gradients: bool) -> Iterator[None]:
        """Count a pass that lasts as long as the block."""
        self._passing = _tokens(data) * (BACKWARD if gradients else 1)
        try:
            yield
            self._done += self._passing
        finally:
            self._passing = 0

    def share(self, of_pass: float) -> float:
        """Return the share of the update that is done, when `of_pass` is that of the pass under way."""
        return min((self._done + of_pass * self._passing) / max(self._whole, 1), 1.0)

    def seconds_left(self, share: float) -> float | None:
        """Return how long the update still takes if it goes on at the same pace; None while nothing of it is done."""
        return (time.monotonic() - self._began) * (1.0 - share) / share if share else None


def _tokens(data: Sequence[Datum]) -> int:
    return sum(len(datum.tokens) for datum in data)
