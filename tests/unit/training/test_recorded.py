"""Prompts that the loop answers again: how often, and which of them it gives up."""

from __future__ import annotations

from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.training.online.prompts import MISSES, REDRAWS, Prompt, Recorded
from mlx_tandem.types import SamplingParams


def prompt(number: int) -> Prompt:
    return Prompt((number,), cast(Any, None), SamplingParams(8))


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.integers(1, 4))
def test_without_traffic_it_comes_to_an_end(teaches: list[bool], count: int) -> None:
    """And what teaches something is answered as often as it may be."""
    recorded = Recorded()
    for number in range(len(teaches)):
        recorded.add(prompt(number))
    drawn = [0] * len(teaches)
    seeds = set()
    while chosen := recorded.next(count):
        assert len({p.tokens for p in chosen}) == len(chosen) <= count
        for p in chosen:
            number = p.tokens[0]
            drawn[number] += 1
            seeds.add(p.params.seed)
            recorded.learned(p, teaches[number])
    assert drawn == [REDRAWS if good else MISSES for good in teaches]
    assert len(seeds) == sum(drawn), "never the same draw twice"
    assert recorded.retired == teaches.count(False)


def test_a_retired_prompt_that_is_asked_again_gets_one_more_chance() -> None:
    recorded = Recorded()
    recorded.add(prompt(1))
    while chosen := recorded.next(1):
        recorded.learned(chosen[0], False)
    recorded.add(prompt(1))
    (again,) = recorded.next(1)
    recorded.learned(again, False)
    assert recorded.next(1) == []


def test_what_teaches_nothing_comes_less_often() -> None:
    recorded = Recorded()
    recorded.add(prompt(1))
    recorded.add(prompt(2))
    order = []
    for _ in range(8):
        (chosen,) = recorded.next(1)
        order.append(chosen.tokens[0])
        recorded.learned(chosen, chosen.tokens[0] == 2)
    assert order.count(1) < order.count(2)
