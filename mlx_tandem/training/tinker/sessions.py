"""Sessions of Tinker's clients: each has a lease, which signs of life renew, and what it holds goes when it ends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlx_tandem.training.tinker.models import TrainedModel
from mlx_tandem.training.tinker.promises import Promise
from mlx_tandem.training.tinker.samplers import Sampler, Snapshots
from mlx_tandem.training.tinker.versions import Versions


class Session:
    """One client's session, with the models that are trained and the samplers by their numbers."""

    def __init__(self, owner: str, versions: Versions, clock: Callable[[], float]):
        """Begin a session now. `clock` returns seconds that only grow."""
        self.id = secrets.token_hex(16)
        self.owner = owner
        self.created = time.time()
        self.name: str | None = None
        self.metadata: Mapping[str, Any] = {}
        self.models: dict[int, TrainedModel] = {}
        self.begun: dict[int, tuple[bytes, Promise]] = {}  # digests and promises of the requests for the models
        self.samplers: dict[int, Sampler] = {}
        self.snapshots = Snapshots(versions)
        self._clock = clock
        self._seen = clock()

    def touch(self) -> None:
        """Renew the lease."""
        self._seen = self._clock()

    @property
    def silent(self) -> float:
        """Seconds since the last sign of life."""
        return self._clock() - self._seen
