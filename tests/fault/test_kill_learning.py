"""A server that learns is killed in the middle of it; the long run is `python -m tests.fault.kill_learning`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault.kill_learning import Killer, run

pytestmark = pytest.mark.restarts


@pytest.mark.promise("FLT-53")
def test_kill_9_while_learning(tmp_path: Path) -> None:
    """The whole server while an update or its publishing is under way, its engine while a checkpoint is written."""
    plan = [("server", "began"), ("engine", "checkpoint begins"), ("server", "published")]
    found = run(tmp_path, [Killer(len(plan), 0, plan)], updates=6)
    assert found["kills"] == len(plan) and found["restarts"] >= len(plan)
