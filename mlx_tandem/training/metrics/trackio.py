"""Trackio, which keeps runs on this machine unless its own environment variables say otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlx_tandem.training.metrics.writer import Sample

COLUMNS = ("prompt", "completion", "reward", "expected")


class Trackio:
    """Writes one run of Trackio, in the project TRACKIO_PROJECT or else "mlx-tandem"."""

    def __init__(self, name: str, settings: Mapping[str, Any]):
        """Begin a run; `settings` are shown with it."""
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "mlx-tandem")
        self._run: Any = trackio.init(project=project, name=name, config=dict(settings))

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers as kind/name, with the optimiser's step beside them."""
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"optimizer_step": step})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples as a table."""
        import pandas
        import trackio

        rows = [[getattr(sample, name) for name in COLUMNS] for sample in samples]
        table = trackio.Table(dataframe=pandas.DataFrame(rows, columns=list(COLUMNS)))
        self._run.log({"samples": table, "optimizer_step": step})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
