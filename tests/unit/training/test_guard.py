"""Whether an update may stand."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlx_tandem.training.online.guard import TOLERANCE, Course, Rewards, k3, mismatch, movement, verdict
from mlx_tandem.training.online.prompts import Judge
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import AdapterRef


class Fixed(Judge):
    """A judge who finds the same mean reward each time."""

    def __init__(self, found: float) -> None:
        super().__init__(cast(Any, None), cast(Any, None))
        self.prompts, self._found = cast(Any, ["a prompt"]), found

    async def reward(self, adapter: AdapterRef | None) -> float | None:
        return self._found


@given(st.none() | st.floats(0, 1), st.floats(0, 1))
def test_the_best_so_far_survives_a_restart_after_which_answers_are_worse(best: float | None, found: float) -> None:
    course = Course(best=best)
    judge = Fixed(found)
    asyncio.run(judge.know_best(course, None))
    assert judge.present == found
    assert course.best == (found if best is None else max(best, found))


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
    for outcome in outcomes:
        course.note(outcome)
    back = outcomes.count("rolled_back")
    assert (course.rollbacks, course.rate_scale) == (back, 0.5**back)
    good = max((i for i, o in enumerate(outcomes) if o in ("published", "kept")), default=-1)
    assert course.lost == (outcomes[good + 1 :].count("rolled_back") >= 3)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 0.5))
def test_what_passes_validation_never_falls_by_more_than_half_the_drop(rewards: list[float], drop: float) -> None:
    course = Course()
    assert course.passes(rewards[0], drop), "there is nothing better yet"
    accepted = [rewards[0]]
    for reward in rewards[1:]:
        if course.passes(reward, drop):
            accepted.append(reward)
            assert reward >= max(accepted) - drop / 2 - 1e-12
        else:
            assert reward < max(accepted) - drop / 2 + 1e-12
    assert not course.passes(None, drop)
    assert course.best == max(accepted)


def test_a_version_is_compared_once_enough_is_known() -> None:
    rewards = Rewards(enough=8, drop=0.1)
    for _ in range(8):
        rewards.add(1, 0.9)
    for _ in range(7):
        rewards.add(2, 0.1)
    assert (rewards.best, rewards.fallen(2), rewards.mean(2)) == (1, False, None)
    rewards.add(2, 0.1)
    assert (rewards.best, rewards.fallen(2), rewards.fallen(1)) == (1, True, False)
    rewards.keep([2])
    assert (rewards.best, rewards.fallen(2)) == (2, False)


def test_chance_alone_brings_no_version_back() -> None:
    """Coins that are the same: the means of 16 differ by more than the drop all the time."""
    rng = random.Random(0)
    fallen = 0
    for _ in range(300):
        rewards = Rewards(enough=16, drop=0.1)
        for version in range(1, 4):
            for _ in range(16):
                rewards.add(version, float(rng.random() < 0.5))
        fallen += rewards.fallen(3)
    assert fallen < 15


def test_means_forget() -> None:
    rewards = Rewards(enough=4, drop=0.1)
    for _ in range(500):
        rewards.add(1, 1.0)
    for _ in range(500):
        rewards.add(1, 0.0)
    mean = rewards.mean(1)
    assert mean is not None and mean < 0.01
