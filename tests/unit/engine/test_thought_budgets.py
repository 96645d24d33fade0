"""Budgets of thoughts: masks that force the closing once the tokens are spent, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.masks import Place, allows
from mlx_tandem.engine.plan import Mask
from mlx_tandem.engine.thought_budgets import ThoughtBudgets
from mlx_tandem.types import Request, SamplingParams, ThoughtBudget

OPEN, CLOSE, END, VOCAB = 30, 31, 32, 40


class NoGrammars:
    """A maker that constrains nothing."""

    def constrains(self, request: Request) -> bool:
        return False

    def masks(self, places: Sequence[Place]) -> list[Mask]:
        raise AssertionError

    def forget(self, request: int, choice: int) -> None:
        pass


def request(budget: int, *, is_open: bool) -> Request:
    thoughts = ThoughtBudget(budget, (OPEN,), (CLOSE,), (END, CLOSE, END), is_open)
    return Request(1, (1, OPEN, 2), SamplingParams(max_tokens=100, thoughts=thoughts))


def drawn(budget: int, wanted: list[int], *, is_open: bool) -> list[int]:
    """What comes of a model that wants these tokens, where it is free."""
    maker, asked = ThoughtBudgets(VOCAB, NoGrammars()), request(budget, is_open=is_open)
    output: list[int] = []
    rest = list(wanted)
    while rest:
        (mask,) = maker.masks([Place(asked, 0, [*asked.prompt, *output])])
        allowed = [token for token in range(VOCAB) if allows(mask, token)]
        assert len(allowed) in (1, VOCAB)
        output.append(rest.pop(0) if len(allowed) == VOCAB else allowed[0])
    return output


def test_a_thought_is_ended_when_its_tokens_are_spent() -> None:
    assert drawn(2, [3, 4, 5, 6], is_open=True) == [3, 4, END, CLOSE, END, 5, 6]
    assert drawn(2, [OPEN, 3, 4, 5, 6], is_open=False) == [OPEN, 3, 4, END, CLOSE, END, 5, 6]
    assert drawn(0, [5, 6], is_open=True) == [END, CLOSE, END, 5, 6]


def test_a_thought_within_its_budget_is_left_alone() -> None:
    assert drawn(3, [3, CLOSE, 4, 5, 6, 7], is_open=True) == [3, CLOSE, 4, 5, 6, 7]
    assert drawn(0, [3, 4, 5], is_open=False) == [3, 4, 5]


def test_a_second_thought_has_what_the_first_left() -> None:
    tokens = [OPEN, 3, CLOSE, 4, OPEN, 5, 6]
    assert drawn(3, tokens, is_open=False) == [OPEN, 3, CLOSE, 4, OPEN, 5, END, CLOSE, END, 6]


@given(st.lists(st.integers(3, VOCAB - 1), max_size=30), st.integers(0, 8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_more_tokens_are_thought(wanted: list[int], budget: int, is_open: bool) -> None:
    output = drawn(budget, wanted, is_open=is_open)
    closing, inside, spent = [END, CLOSE, END], is_open, 0
    for at, token in enumerate(output):
        if inside:
            assert spent < budget or output[at : at + 2] == closing[: len(output) - at][:2] or token == CLOSE
            spent += 1
            inside = token != CLOSE
        else:
            inside = token == OPEN


@given(st.lists(st.integers(29, END), min_size=1, max_size=30), st.data())
@settings(max_examples=100, deadline=None)
def test_masks_depend_on_the_tokens_alone(output: list[int], data: st.DataObject) -> None:
    """Also after drafts that were not accepted, and after a preemption."""
    asked = request(3, is_open=False)
    maker = ThoughtBudgets(VOCAB, NoGrammars())
    for _ in range(5):
        tokens = [*asked.prompt, *output[: data.draw(st.integers(0, len(output)))]]
        tail = data.draw(st.lists(st.integers(29, END), max_size=3))
        place = Place(asked, 0, tokens + tail)
        assert maker.masks([place]) == ThoughtBudgets(VOCAB, NoGrammars()).masks([place])
    maker.forget(1, 0)
