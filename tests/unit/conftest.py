"""What several modules of tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The online loop waits for nothing between two attempts, nor between two states of the trainer, nor for the drive:
    no test that uses this loses its power."""
    from mlx_tandem.files import Disk
    from mlx_tandem.training.online import loop, states
    from mlx_tandem.training.store import database

    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(loop, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(states, "REST", 0.0)
    monkeypatch.setattr(database, "PRAGMAS", ("synchronous = OFF",))
    monkeypatch.setattr(Disk, "sync", lambda self, fd: None)
