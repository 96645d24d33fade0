"""The learning rate that is found by how far updates move the policy: it gets there, stays there, and is remembered."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.online import rates
from mlx_tandem.training.online.guard import TOLERANCE, Course
from mlx_tandem.training.online.rates import Pace
from tests.unit.learning_fakes import Points, config, group
from tests.unit.online_side import Side, feed, on_a_loop, running
from tests.unit.training.test_online_ends import counted, learn

pytestmark = pytest.mark.usefixtures("at_once")

TARGET = RLTrainingConfig().target_kl
SMALL = 2e-9
"""A target that the fakes reach at a rate within the bounds: they move by rate² / 200."""

RIGHT = math.sqrt(200 * SMALL)


def after(updates: int, moved: Callable[[float], float], pace: Pace | None = None) -> list[float]:
    """Return the rates of so many updates and of the next one, where a rate moves the policy so far."""
    pace = pace or Pace()
    found = [pace.rate]
    for _ in range(updates):
        pace.note(moved(pace.rate), pace.rate, TARGET)
        found.append(pace.rate)
    return found


@pytest.mark.parametrize("right", [1e-6, 1e-5, 1e-4, 5e-4, 9e-4])
def test_the_rate_is_soon_the_one_that_moves_the_policy_as_far_as_it_should(right: float) -> None:
    found = after(12, lambda rate: TARGET * (rate / right) ** 2)
    assert found[12] == pytest.approx(right, rel=0.25)
    steps = [b / a for a, b in itertools.pairwise(found)]
    assert max(steps) <= rates.MOST_CHANGE * 1.001 and min(steps) >= 0.999 / rates.MOST_CHANGE
    assert max(found) <= max(1.6 * right, rates.FIRST), "it does not overshoot by much"


def test_noise_makes_the_rate_neither_large_nor_small() -> None:
    """Measured where rewards were shuffled: an update moves the policy between a thousandth and sixty times as far as
    the one before."""
    rng = random.Random(1)
    found = after(2000, lambda rate: TARGET * (rate / 5e-4) ** 2 * rng.lognormvariate(-2.0, 2.0))
    assert max(found) <= rates.MOST and min(found[20:]) > 1e-4


def test_one_measurement_that_is_far_too_high_at_first_does_not_keep_the_rate_low() -> None:
    pace = Pace()
    pace.note(TARGET / 5, pace.rate, TARGET)
    found = after(25, lambda rate: TARGET * (rate / 8e-4) ** 2, pace)
    assert found[0] < 1e-4
    assert found[-1] > 0.4e-3


def test_one_wild_measurement_changes_little() -> None:
    pace = Pace()
    before = after(20, lambda rate: TARGET * (rate / 8e-4) ** 2, pace)[-1]
    pace.note(300 * TARGET, pace.rate, TARGET)
    assert pace.rate > before / 2
    assert after(15, lambda rate: TARGET * (rate / 8e-4) ** 2, pace)[-1] == pytest.approx(before, rel=0.25)


def test_one_high_measurement_at_the_first_rate_that_moves_anything_changes_little() -> None:
    """Measured on the second task: one update moved the policy by sixty times as much as the next ones say."""
    pace = Pace()
    found = [pace.rate]
    for sensitivity in (1266, 1484, 28018, 505, 672, 1185, 1564, 2048):
        pace.note(sensitivity * pace.rate**2, pace.rate, TARGET)
        found.append(pace.rate)
    assert min(found[3:]) > 0.35e-3
    assert found[-1] == pytest.approx(math.sqrt(TARGET / 1300), rel=0.3)


def agreeing(updates: int, agreement: Callable[[], float], pace: Pace) -> list[float]:
    """Return the shares of the rate that are used, where gradients agree so far."""
    found = []
    for _ in range(updates):
        pace.note(TARGET * (pace.next / 5e-4) ** 2, pace.next, TARGET, agreement())
        found.append(pace.share)
    return found


@pytest.mark.parametrize("spread", [0.13, 0.7])
def test_where_gradients_do_not_agree_updates_hardly_move_the_policy(spread: float) -> None:
    """0.13 is what shuffled rewards showed. It is larger where all answers depend on a few weights."""
    rng = random.Random(2)
    pace = Pace()
    found = agreeing(500, lambda: max(min(rng.gauss(0.0, spread), 1.0), -1.0), pace)
    assert sum(share**2 for share in found) / len(found) < 0.1, "the movement is the square of the share"
    assert pace.rate == pytest.approx(5e-4, rel=0.1), "the rate that is found depends on no share"


def test_where_gradients_agree_the_whole_rate_is_used_also_after_a_time_of_noise() -> None:
    rng = random.Random(3)
    pace = Pace()
    assert pace.share == 1.0, "nothing is known"
    found = agreeing(40, lambda: rng.gauss(0.6, 0.1), pace)
    assert min(found[:2]) > 0.25 and min(found[3:]) == 1.0
    assert min(agreeing(40, lambda: rng.gauss(0.4, 0.25), pace)) > 0.4
    agreeing(40, lambda: rng.gauss(0.0, 0.13), pace)
    assert agreeing(12, lambda: rng.gauss(0.6, 0.1), pace)[-1] > 0.9


def test_a_policy_that_nothing_moves_does_not_get_an_endless_rate() -> None:
    assert after(1000, lambda rate: 0.0)[-1] == rates.MOST
    assert after(1000, lambda rate: 1e9)[-1] == rates.LEAST
    pace = Pace()
    after(10, lambda rate: TARGET * (rate / 8e-4) ** 2, pace)
    before = pace.rate
    pace.note(0.0, 0.0, TARGET)
    assert pace.rate == before, "a rate of 0 says nothing"


def test_what_rounding_explains_does_not_hold_the_rate_down() -> None:
    """In 16 bits logprobs differ by a few 1e-4 nats, whatever the rate."""
    course = Course()
    course.begin("auto")
    for _ in range(20):
        rate = course.learning_rate
        course.moved(TARGET * (rate / 5e-4) ** 2 + TOLERANCE, rate, TARGET, rounding=TOLERANCE)
    assert course.learning_rate == pytest.approx(5e-4, rel=0.3)


def test_a_rollback_halves_the_movement_and_not_only_for_one_update() -> None:
    """What the guard has halved is not raised again at once, since less movement was what it wanted."""
    course = Course()
    course.begin("auto")
    for _ in range(20):
        course.moved(TARGET * (course.learning_rate / 8e-4) ** 2, course.learning_rate, TARGET)
    course.note("rolled_back")
    for _ in range(3):
        course.moved(TARGET * (course.learning_rate / 8e-4) ** 2, course.learning_rate, TARGET)
        course.note("published")
    assert course.learning_rate < 0.5e-3
    course.begin(3e-4)
    assert course.learning_rate == 3e-4, "a number is a fixed rate, which begins unscaled"
    course.moved(1e-9, 3e-4, TARGET)
    assert course.learning_rate == 3e-4


@on_a_loop
async def test_without_a_rate_a_server_finds_one_and_remembers_it(tmp_path: Path) -> None:
    settings = config(tmp_path, learning_rate="auto", target_kl=SMALL)
    async with running(settings, start=False) as side:
        for number in range(1, 9):
            assert (await side.learner.update(group(number))).outcome == "published"
        assert side.client.rates[0] == rates.FIRST
        assert side.client.rates[-1] == pytest.approx(RIGHT, rel=0.3)
        found = side.learner.status()
        assert found.target_kl == SMALL and found.kl == pytest.approx(SMALL, rel=0.6)
    async with running(settings, start=False) as side:
        assert side.learner.status().learning_rate == found.learning_rate
        await side.learner.update(group(10))
        assert side.client.rates == [found.learning_rate]
    async with running(config(tmp_path, learning_rate=0.25), start=False) as side:
        assert (side.learner.status().learning_rate, side.learner.status().target_kl) == (0.25, 0.0)


@on_a_loop
async def test_the_rate_that_is_found_has_a_schedule_as_well(tmp_path: Path) -> None:
    settings = config(tmp_path, learning_rate="auto", target_kl=SMALL, schedule="linear", decay_steps=10)
    async with running(settings, start=False) as side:
        for number in range(1, 12):
            await side.learner.update(group(number))
        reports = side.learner.history
        assert reports[7].kl == pytest.approx(SMALL * 0.3**2, rel=0.5), "a third of the rate"
        assert reports[-1].learning_rate == 0.0
        assert side.learner.status().learning_rate == pytest.approx(RIGHT, rel=0.3)


@on_a_loop
async def test_updates_that_measured_nothing_do_not_change_the_rate(tmp_path: Path) -> None:
    async with running(config(tmp_path, learning_rate="auto", target_kl=SMALL)) as side:
        side.client.broken_gradients = True
        await feed(side, [1, 2], 1)
        assert side.learner.history[-1].outcome == "rolled_back"
        assert side.learner.status().learning_rate == rates.FIRST / 2
        side.client.broken_gradients = False
        await side.learner.add([t for n in (3, 4) for t in group(n, p=-3.0)], 2)
        await side.until(lambda: side.learner.status().updates == 2)
        assert side.learner.history[-1].outcome == "refused"
        assert side.learner.status().learning_rate == rates.FIRST / 2


def test_killed_at_any_point_it_goes_on_with_the_rates_that_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = [Points()]
    counted(monkeypatch, points)
    auto = {"learning_rate": "auto", "target_kl": SMALL}
    whole = learn(tmp_path / "whole", points, **auto)
    total = points[0].count
    for at in random.Random(total).sample(range(1, total), 12):
        points.append(Points(at))
        assert learn(tmp_path / str(at), points, **auto) == whole, f"killed at {at} of {total}"


@on_a_loop
async def test_an_engine_that_ends_changes_no_rate(tmp_path: Path) -> None:
    async def found(folder: Path, ends: bool) -> tuple[str, float]:
        side = Side(config(folder, learning_rate="auto", target_kl=SMALL))
        await side.bring_up()
        for number in range(1, 7):
            await side.learner.update(group(number))
            if ends:
                side.client.restart()
                await side.bring_up()
        result = side.digest, side.learner.status().learning_rate
        await side.learner.close()
        await asyncio.sleep(0)
        return result

    assert await found(tmp_path / "a", True) == await found(tmp_path / "b", False)
