"""Whether an update may stand."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.training.online.guard import GIVE_UP, RECOVERY, TOLERANCE, Course, k3, mismatch, movement, verdict
from mlx_tandem.training.trajectories import Trajectory

LOGPROBS = st.lists(st.floats(-20, 0), min_size=1, max_size=20)


@given(st.lists(st.floats(-30, 30), min_size=1))
def test_k3_is_a_distance(differences: list[float]) -> None:
    found = k3(differences)
    assert found is not None and found >= 0
    assert k3([0.0] * len(differences)) == 0
    half = k3([d / 2 for d in differences])
    assert half is not None and half <= found + 1e-12


def test_k3_estimates_the_divergence_of_two_distributions() -> None:
    p, q = (0.5, 0.3, 0.2), (0.4, 0.4, 0.2)
    expected = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    drawn = random.Random(1).choices(range(3), p, k=200_000)
    assert k3([math.log(q[i] / p[i]) for i in drawn]) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_as_bad_as_can_be(wrong: float) -> None:
    assert k3([0.0, wrong]) == math.inf
    assert verdict(math.inf, 0.1) == "refused"
    assert movement([(0.0, 0.0)], [(0.0, wrong)]) == math.inf


def completion(versions: tuple[int, ...], q: float = -1.0) -> Trajectory:
    n = len(versions)
    return Trajectory("t", "g", (1,), (2,) * n, (-9.0,) * n, (q,) * n, versions, 0.5, 1.0)


def test_only_tokens_of_the_present_version_are_compared() -> None:
    t = completion((3, 4, 4))
    own = [(-8.0, -1.0, -1.2)]
    assert mismatch([t], own, 4) == pytest.approx((math.exp(-0.2) - 1 + 0.2) / 2)
    assert mismatch([t], own, 5) is None
    assert mismatch([replace(t, external=True)], own, 4) is None
    tool = replace(t, mask=(1, 1, 0))
    assert mismatch([tool], [(-8.0, -1.3, -7.0)], 4) == pytest.approx(math.exp(-0.3) - 1 + 0.3), "nobody drew the last"
    further = mismatch([completion((4,))], [(-0.5,)], 4)
    assert further == pytest.approx(math.exp(0.5) - 1 - 0.5), "of the trainer to the sampler, not the other way round"
    assert mismatch([completion((4,), math.nan)], [(-1.0,)], 4) == math.inf


@given(st.none() | st.floats(0, 10), st.floats(1e-6, 1))
def test_verdicts_are_in_order(measured: float | None, refuse: float) -> None:
    found = verdict(measured, refuse)
    if measured is None:
        assert found == "ok"
    else:
        assert (found == "refused") == (measured > refuse)
        assert found != "ok" or measured <= TOLERANCE


def test_a_mismatch_of_a_fifth_of_a_nat_is_refused() -> None:
    d = -0.72  # exp(d) - 1 - d is 0.2
    assert verdict(k3([d] * 10), 0.1) == "refused"
    assert verdict(5e-4, 0.1) == "ok"
    assert verdict(0.05, 0.1) == "corrected"


@given(st.lists(st.sampled_from(["published", "kept", "rolled_back", "refused", "skipped"]), max_size=20))
def test_the_course_follows_from_what_became_of_updates(outcomes: list[str]) -> None:
    course = Course()
    scale = 1.0
    for outcome in outcomes:
        course.note(outcome)
        scale *= 0.5 if outcome == "rolled_back" else RECOVERY if outcome in ("published", "kept") else 1.0
        scale = min(scale, 1.0)
        assert course.rate_scale == scale
    assert course.rollbacks == outcomes.count("rolled_back")
    good = max((i for i, o in enumerate(outcomes) if o in ("published", "kept")), default=-1)
    assert course.in_a_row == outcomes[good + 1 :].count("rolled_back")
    assert course.lost == (course.in_a_row >= GIVE_UP)


def test_a_rate_that_somebody_sets_begins_unscaled() -> None:
    course = Course(rate_scale=0.25, in_a_row=3)
    course.begin(1e-4)  # a checkpoint of an earlier version does not say to which rate its scale belongs
    assert course.rate_scale == 0.25
    course.begin(1e-4)
    assert course.rate_scale == 0.25
    course.begin(2e-4)
    assert (course.rate_scale, course.in_a_row) == (1.0, 0)
