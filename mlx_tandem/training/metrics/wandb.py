"""Weights & Biases. Its own environment variables, such as WANDB_MODE and WANDB_API_KEY, apply."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_tandem.training.metrics.writer import Sample

COLUMNS = ("prompt", "completion", "reward", "expected")


class WeightsAndBiases:
    """Writes one run of W&B, in the project WANDB_PROJECT or else "mlx-tandem"."""

    def __init__(self, folder: Path, name: str, settings: Mapping[str, Any]):
        """Begin a run with local files in `folder`; `settings` are shown with it."""
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        project = os.environ.get("WANDB_PROJECT", "mlx-tandem")
        quiet = wandb.Settings(silent=True, console="off")
        self._run: Any = wandb.init(project=project, name=name, dir=str(folder), config=dict(settings), settings=quiet)

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers as kind/name, with the optimiser's step beside them."""
        self._run.log({f"{kind}/{name}": value for name, value in values.items()} | {"optimizer_step": step})

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write samples as a table."""
        import wandb

        rows = [[getattr(sample, name) for name in COLUMNS] for sample in samples]
        self._run.log({"samples": wandb.Table(columns=list(COLUMNS), data=rows), "optimizer_step": step})

    def close(self) -> None:
        """End the run."""
        self._run.finish()
