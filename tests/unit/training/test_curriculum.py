"""Prompts that the loop answers again: which of them are next, how often they come, and what is known of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.training.online import curriculum
from mlx_tandem.training.online.curriculum import ALIKE, LEAST, REDRAWS, Choice, Curriculum
from mlx_tandem.training.online.prompts import Prompt
from mlx_tandem.training.online.serving import Recorded
from mlx_tandem.training.trajectories import Trajectory
from mlx_tandem.types import SamplingParams
from tests.unit.learning_fakes import config
from tests.unit.online_side import on_a_loop, running

SIZE = 8
GOOD, BAD, MIXED = [1.0] * SIZE, [0.0] * SIZE, [0.0, 1.0] * (SIZE // 2)
DULL_TURNS = 4
"""Times that a prompt is answered whose answers never differ."""

group_rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=SIZE, max_size=SIZE)
choices = st.sampled_from(["variance", "uniform"])


def prompt(number: int) -> Prompt:
    return Prompt((number,), cast(Any, None), SamplingParams(8))


def answers(number: int, rewards: Sequence[float]) -> list[Trajectory]:
    return [Trajectory("t", "g", (number,), (1,), (-1.0,), (-1.0,), (1,), 1.0, reward) for reward in rewards]


def asked(*numbers: int, choice: Choice = "variance") -> Curriculum:
    made = Curriculum(choice)
    for number in numbers:
        made.add(prompt(number))
    return made


def turn(of: Curriculum, rewards: Any, count: int = 1) -> list[int]:
    """Have the next prompts answered with `rewards(number)`, and return their numbers."""
    chosen = of.next(count)
    for each in chosen:
        of.answered(each, answers(each.tokens[0], rewards(each.tokens[0])), SIZE)
    return [each.tokens[0] for each in chosen]


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 4), choices)
def test_without_traffic_it_comes_to_an_end(teaches: list[bool], count: int, choice: Choice) -> None:
    """And what teaches something is answered as often as it may be."""
    made = asked(*range(len(teaches)), choice=choice)
    drawn = [0] * len(teaches)
    seeds = set()
    while chosen := made.next(count):
        assert len({p.tokens for p in chosen}) == len(chosen) <= count
        for p in chosen:
            number = p.tokens[0]
            drawn[number] += 1
            seeds.add(p.params.seed)
            made.answered(p, answers(number, MIXED if teaches[number] else GOOD), SIZE)
    assert drawn == [REDRAWS if good else DULL_TURNS for good in teaches]
    assert len(seeds) == sum(drawn), "never the same draw twice"


@pytest.mark.parametrize("rewards", [GOOD, []])
def test_a_spent_prompt_that_is_asked_again_gets_one_more_chance(rewards: list[float]) -> None:
    """Whether its answers were all the same or none could be scored."""
    made = asked(1)
    turns = 0
    while turn(made, lambda _: rewards):
        turns += 1
    assert turns == DULL_TURNS
    made.add(prompt(1))
    assert turn(made, lambda _: rewards) == [1]
    assert made.next(1) == []


@settings(max_examples=25)
@given(st.integers(1, 5), st.sampled_from([GOOD, BAD, MIXED, []]), st.booleans(), st.integers(0))
def test_no_prompt_waits_for_ever(count: int, usual: list[float], flood: bool, seed: int) -> None:
    """Not even while a new prompt comes every turn, of which only the last few are kept."""
    rng = random.Random(seed)
    made, numbers = asked(*range(count)), list(range(count))
    waited = dict.fromkeys(numbers, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curriculum, "RECORDED", count + 3)
        for time in range(400):
            for number in [*([100 + time] if flood else []), *numbers]:
                made.add(prompt(number))  # somebody asks all of them all the time
            (chosen,) = turn(
                made, lambda n: rng.choice([usual, [0.0, 1.0] * 4]) if n == 0 else rng.choice([GOOD, usual])
            )
            waited = {number: 0 if number == chosen else turns + 1 for number, turns in waited.items()}
            assert max(waited.values()) <= (count + 3) * (1 / LEAST + 2)


@given(st.lists(st.tuples(group_rewards, st.integers(0, 4)), max_size=40), choices)
def test_the_choice_depends_on_nothing_but_what_it_was_told(
    told: list[tuple[list[float], int]], choice: Choice
) -> None:
    """And not on the scale of the rewards."""
    made = [asked(0, 1, 2, choice=choice) for _ in range(3)]
    for rewards, live in told:
        for each, scale in zip(made, (1.0, 1.0, 4.0), strict=True):
            each.add(prompt(live))
            each.see(answers(live, [scale * rewards[0]]))
        scaled = ([scale * r for r in rewards] for scale in (1.0, 1.0, 4.0))
        first, second, third = (turn(each, lambda _, own=own: own, 2) for each, own in zip(made, scaled, strict=True))
        assert first == second == third


def test_what_teaches_comes_most_often_and_what_does_not_still_comes() -> None:
    rewards = {1: GOOD, 2: MIXED, 3: BAD, 4: [0.0] * 7 + [1.0], 5: MIXED}
    drawn: dict[Choice, Counter[int]] = {}
    for choice in ("variance", "uniform"):
        made = asked(*rewards, choice=cast(Choice, choice))
        drawn[cast(Choice, choice)] = own = Counter[int]()
        for _ in range(400):
            own.update(turn(made, rewards.__getitem__))
            for number in rewards:
                made.add(prompt(number))
    often = drawn["variance"]
    assert often[2] == pytest.approx(often[5], abs=1)
    assert often[4] == pytest.approx(often[2] * 7 / 16, rel=0.3), "its rewards have 7/16 of the variance"
    assert often[1] == pytest.approx(often[3], abs=1) and often[1] == pytest.approx(often[2] * LEAST, rel=0.1)
    assert max(drawn["uniform"].values()) - min(drawn["uniform"].values()) <= 1


def test_new_prompts_come_first_in_the_order_in_which_they_were_asked() -> None:
    made = asked(1, 2)
    for _ in range(9):
        turn(made, lambda _: MIXED)
    for number in (5, 3, 4):
        made.add(prompt(number))
    assert [turn(made, lambda _: MIXED)[0] for _ in range(3)] == [5, 3, 4]


def test_answers_of_requests_count_too() -> None:
    """Those to one prompt differ, and those to the other never do."""
    made = asked(1, 2)
    turn(made, lambda _: MIXED, 2)
    for _ in range(64):
        made.see([*answers(1, [1.0]), *answers(2, [0.0, 1.0]), *answers(3, [0.0, 1.0])])
    first = [turn(made, lambda number: GOOD if number == 1 else MIXED)[0] for _ in range(8)]
    assert first == [2] * 8 and len(made) == 2


def test_what_was_solved_and_is_forgotten_comes_often_again() -> None:
    made = asked(1, 2)
    before, after = Counter[int](), Counter[int]()
    for count, rewards in ((before, GOOD), (after, MIXED)):
        for _ in range(100):
            count.update(turn(made, lambda number, now=rewards: now if number == 1 else MIXED))
            made.add(prompt(1))
            made.add(prompt(2))
    assert before[1] < 10 and after[1] > 40


def test_prompts_are_bounded_and_those_asked_longest_ago_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curriculum, "RECORDED", 4)
    made = asked(0, 1, 2, 3)
    assert turn(made, lambda _: MIXED, 2) == [0, 1]
    made.add(prompt(0))
    made.add(prompt(4))
    assert len(made) == 4
    assert {p.tokens for p in made.next(9)} == {(2,), (3,), (0,), (4,)}


def test_what_is_known_of_prompts_is_counted() -> None:
    assert Curriculum().recorded == Recorded()
    made = asked(1, 2, 3, 4, 5)
    made.see(answers(1, [0.0] + [0.9] * (ALIKE - 1)))
    made.see(answers(2, [0.89] * ALIKE))
    made.see(answers(3, [1.0] * ALIKE + [0.0]))
    made.see(answers(4, [1.0]))
    assert made.recorded == Recorded(prompts=5, new=1, solved=0, hopeless=1, between=3)
    made.see(answers(1, [0.9]))
    assert made.recorded == Recorded(prompts=5, new=1, solved=1, hopeless=1, between=2)


@on_a_loop
async def test_a_learner_counts_the_answers_of_its_prompts_until_it_ends(tmp_path: Path) -> None:
    """A new process knows no prompts: those that are asked again are new."""
    params = SamplingParams(8)
    async with running(config(tmp_path, group_size=4), lambda _: "yes", start=False) as side:
        scoring = side.learner.rewards.check("exact_match", {"answer": "yes"})
        for number in (1, 2, 3):
            side.learner.record_prompt((number,), scoring, params)
        await side.learner.add(answers(3, GOOD), SIZE)
        assert side.learner.status().recorded_prompts == Recorded(prompts=3, new=2, solved=1)
        assert await side.learner._sample()
        assert side.learner.status().recorded_prompts == Recorded(prompts=3, new=1, solved=1, between=1)
    async with running(config(tmp_path, group_size=4), lambda _: "yes", start=False) as side:
        assert side.learner.status().recorded_prompts == Recorded()
        side.learner.record_prompt((1,), scoring, params)
        assert side.learner.status().recorded_prompts == Recorded(prompts=1, new=1)
