"""Schedules of the learning rate: their rise, their fall and their floor."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.training.schedules import Schedule

SCHEDULES = st.builds(
    Schedule,
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 50),
    st.integers(0, 200),
    st.floats(0.0, 1.0),
)


@given(SCHEDULES)
def test_it_rises_to_1_and_never_rises_again(schedule: Schedule) -> None:
    shares = [schedule.share(step) for step in range(1, schedule.warmup_steps + schedule.decay_steps + 20)]
    rise, rest = shares[: schedule.warmup_steps], shares[schedule.warmup_steps :]
    assert rise == [(i + 1) / schedule.warmup_steps for i in range(len(rise))]
    assert rest[0] == 1.0
    assert all(b <= a for a, b in itertools.pairwise(rest))
    assert min(rest) >= schedule.floor - 1e-12
    falls = schedule.kind != "constant" and schedule.decay_steps
    assert rest[-1] == pytest.approx(schedule.floor if falls else 1.0)


@pytest.mark.parametrize(("kind", "quarter"), [("linear", 0.75), ("cosine", 0.5 * (1 + math.cos(math.pi / 4)))])
def test_it_has_the_form_that_it_is_named_after(kind: str, quarter: float) -> None:
    schedule = Schedule.over(kind, 110, 10, 0.2)  # type: ignore[arg-type]
    assert schedule.share(36) == pytest.approx(0.2 + 0.8 * quarter)
    assert schedule.share(61) == pytest.approx(0.6)
    assert schedule.share(111) == pytest.approx(0.2) == schedule.share(10**9)
