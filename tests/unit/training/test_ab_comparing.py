"""The comparison of an alias's arms: what is compared with what, what is decided, and what never is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ab import DIFFERENT, OUTSIDE, PROMISED, named
from mlx_tandem.config import ABTest, Arm
from mlx_tandem.training.ab.comparing import WAITING, AliasTest, Verdict

SCORES = st.floats(-1e6, 1e6)


def begun(*challengers: str, **settings: float) -> AliasTest:
    arms = [Arm(name, 1.0) for name in ("old", *(challengers or ("new",)))]
    made = ABTest("old", **settings)  # type: ignore[arg-type]
    return AliasTest.begin("1", "chat", made, arms, (None, None), 0.0)


def ended(test: AliasTest, scores: Sequence[tuple[str, float]]) -> list[tuple[str, Verdict]]:
    """The verdicts that these scores lead to."""
    return [verdict for n, (arm, score) in enumerate(scores) for verdict in test.add(arm, score, float(n))]


@given(st.lists(st.tuples(st.booleans(), SCORES), max_size=100))
def test_each_score_is_compared_once_with_the_newest_of_the_other_side(scores: list[tuple[bool, float]]) -> None:
    test = begun(false_promotion=1e-9, false_take_back=1e-9)
    waiting: dict[bool, list[float]] = {True: [], False: []}
    differences = []
    for is_new, score in scores:
        test.add("new" if is_new else "old", score, 0.0)
        if other := waiting[not is_new]:
            differences.append((score - other.pop()) * (1.0 if is_new else -1.0))
        else:
            waiting[is_new] = [*waiting[is_new], score][-WAITING:]
    comparison = test.challengers["new"].comparison
    assert comparison.count == len(differences)
    assert comparison.total == pytest.approx(sum(differences), abs=1e-3)
    assert test.scores["new"].answers + test.scores["old"].answers == len(scores)


@given(
    st.lists(st.tuples(st.sampled_from(["old", "new", "other"]), st.floats(allow_nan=True, allow_infinity=True))),
    st.integers(1, 20),
)
def test_no_score_breaks_a_test(scores: list[tuple[str, float]], least: int) -> None:
    test = begun("new", "other", min_answers=least)
    for arm, score in scores:
        if arm in {each.adapter for each in test.serving}:
            test.add(arm, score, 1.0)
        assert test.serving, "somebody answers"
        assert (test.decided is None) == (len(test.serving) > 1)
        for each in test.challengers.values():
            assert math.isfinite(each.comparison.gain.wealth) and math.isfinite(each.comparison.harm.wealth)
            assert len(each.waiting) <= WAITING
            assert each.verdict is None or each.comparison.count >= least
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(test), type=AliasTest)
    assert again == test, "a restart changes nothing"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=200))
def test_both_directions_are_mirror_images(scores: list[tuple[bool, float]]) -> None:
    """What shows that an arm is better shows that it is worse where the scores have changed places."""
    one = ended(begun(), [("new" if is_new else "old", score) for is_new, score in scores])
    other = ended(begun(), [("old" if is_new else "new", score) for is_new, score in scores])
    opposite = {"promoted": "taken_back", "taken_back": "promoted"}
    assert [opposite[verdict] for _, verdict in one] == [verdict for _, verdict in other]


def test_arms_that_score_alike_never_end_a_test() -> None:
    test = begun()
    assert ended(test, [("old", 0.7), ("new", 0.7)] * 2000) == []
    assert test.challengers["new"].comparison.count == 2000


@pytest.mark.parametrize(("new", "verdict", "left"), [(1.0, "promoted", "new"), (0.0, "taken_back", "old")])
def test_the_better_arm_is_left(new: float, verdict: Verdict, left: str) -> None:
    test = begun()
    assert ended(test, [("new", new), ("old", 1.0 - new)] * 60) == [("new", verdict)]
    assert [arm.adapter for arm in test.serving] == [left]
    assert test.decided is not None
    before = msgspec.msgpack.encode(test)
    assert test.add("old", 1.0, 99.0) == [] and msgspec.msgpack.encode(test) == before


def test_nothing_is_decided_before_enough_answers() -> None:
    test = begun(false_promotion=0.5, min_answers=30)
    verdicts = [bool(test.add(arm, score, 0.0)) for arm, score in [("new", 1.0), ("old", 0.0)] * 30]
    assert verdicts.index(True) == 59


def test_a_challenger_that_is_worse_goes_and_the_test_of_the_others_goes_on() -> None:
    test = begun("bad", "good")
    rounds = [("old", 0.5), ("bad", 0.0), ("good", 0.5)]
    for n in range(300):
        for arm, score in rounds:
            if arm in {each.adapter for each in test.serving} and test.add(arm, score, float(n)):
                assert (arm, test.decided) in (("bad", None), ("old", None))
    assert [arm.adapter for arm in test.serving] == ["old", "good"]
    found = ended(test, [("old", 0.5), ("good", 1.0)] * 200)
    assert found == [("good", "promoted")] and [arm.adapter for arm in test.serving] == ["good"]


def test_several_challengers_share_the_error_rates() -> None:
    """The first of eight needs eight times the evidence that one alone needs."""
    scores = [("a", 1.0), ("old", 0.0)] * 200
    alone, among = begun("a"), begun(*"abcdefgh")
    counts = []
    for test in (alone, among):
        assert ended(test, scores) == [("a", "promoted")]
        counts.append(test.challengers["a"].comparison.count)
    assert among.challengers["a"].comparison.gain.wealth >= 160.0 > alone.challengers["a"].comparison.gain.wealth >= 20
    assert counts[1] > counts[0]


def test_equal_arms_are_seldom_told_apart() -> None:
    """Of 200 runs with 600 answers, as many may err as are likely at the rates that are asked for, 10 % each."""
    errors = {"promoted": 0, "taken_back": 0}
    for seed in range(200):
        rng = random.Random(seed)
        scores = [("new" if rng.random() < 0.3 else "old", float(rng.random() < 0.4)) for _ in range(600)]
        for _, verdict in ended(begun(false_promotion=0.1, false_take_back=0.1), scores):
            errors[verdict] += 1
    assert all(count <= 30 for count in errors.values()), errors
    assert all(count >= 1 for count in errors.values()), f"looks at nothing: {errors}"


@pytest.mark.parametrize("case", [*PROMISED, *OUTSIDE, *DIFFERENT])
def test_the_simulation_runs_to_its_end(case: str) -> None:
    run = named(1, case, 60)
    assert run.answers == 60 or run.verdicts
