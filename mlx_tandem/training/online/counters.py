"""The loop's own state beside its trajectories: what it has counted, judged and learned about its rate."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from mlx_tandem.training.online.baselines import Baselines
from mlx_tandem.training.online.guard import Course
from mlx_tandem.training.online.live_rewards import Mean
from mlx_tandem.training.online.trial import Trial
from mlx_tandem.training.store.manifests import Manifest
from mlx_tandem.training.store.records import Ended
from mlx_tandem.training.trajectories import Counts


class Counters(Struct):
    """The state of the loop, which is written with everything that changes it, and in each checkpoint."""

    updates: int = 0  # that have ended
    publishes: int = 0
    checkpoint_saves: int = 0
    last_version: int = 0  # the highest number ever given
    last_update: float | None = None  # seconds since the epoch
    since_checkpoint: int = 0  # updates
    course: Course = field(default_factory=Course)
    counts: Counts = field(default_factory=Counts)
    trial: Trial = field(default_factory=Trial)
    means: dict[int, Mean] = {}
    baselines: Baselines = {}

    def note(self, end: Ended, false_rollback: float) -> None:
        """Count an update that has come to its end; what is shown to be worse is compared afresh."""
        self.course.note(end.outcome)
        self.updates += 1
        self.since_checkpoint += 1
        self.trial.updates += 1
        self.last_version = max(self.last_version, end.version)
        if end.outcome == "rolled_back" and self.trial.is_worse(false_rollback):
            self.trial.begin(self.trial.accepted)


def to_manifest(counters: Counters) -> dict[str, Any]:
    """Return counters as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(counters, str_keys=True)
    return plain


def of_manifest(manifest: Manifest | None) -> Counters:
    """Return a copy of what the checkpoint says; without one, what holds at the very beginning."""
    return Counters() if manifest is None else msgspec.convert(manifest.counters, Counters, str_keys=True, strict=False)
