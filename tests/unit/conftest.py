"""What several modules of tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The online loop waits for nothing between two attempts."""
    from mlx_tandem.training.online import loop

    monkeypatch.setattr(loop, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(loop, "POLL_SECONDS", 0.0)
