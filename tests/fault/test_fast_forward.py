"""Two hours of learning in fast forward; `benchmarks/fast_forward.py` has days."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fast_forward import Found, Plan, day, judged


@pytest.mark.slow
@pytest.mark.restarts
def test_two_hours_with_kills_and_a_full_drive_lose_nothing_and_let_nothing_grow(tmp_path: Path) -> None:
    found = day(tmp_path, seed=0, hours=2.0, kills=2, validated=True)
    assert found.faults == []
    assert found.lives >= 3 and found.engine_deaths and found.full and found.updates > 10


def test_what_falls_or_grows_is_a_fault() -> None:
    plan = Plan(0, 2.0, 0)
    good = Found(start=0.5, rewards=[0.3, 0.5], most={"buffered": 256, "tasks": 4}, grown={"objects": 1.1})
    assert judged(good, plan) == []
    for change in ({"rewards": [0.6, 0.29]}, {"most": {"tasks": 1000}}, {"grown": {"memory": 2.0}}, {"rewards": []}):
        assert judged(Found(**(vars(good) | change)), plan), change
