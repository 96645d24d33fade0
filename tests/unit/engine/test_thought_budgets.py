"""Budgets of thoughts: masks that force the closing once the tokens are spent, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.engine.masks import Place, allows
from mlx_tandem.engine.plan import Mask
from mlx_tandem.engine.thought_budgets import ThoughtBudgets
from mlx_tandem.types import Request, SamplingParams, ThoughtBudget
from tests.engine.workloads import NeverLate

OPEN, CLOSE, END, VOCAB = 30, 31, 32, 40


class NoGrammars(NeverLate):
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
        assert mask is not None
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


class Grammars(NoGrammars):
    """A maker that constrains requests with odd numbers. Its mask says of which place it is."""

    def __init__(self) -> None:
        self.open: set[tuple[int, int]] = set()

    def constrains(self, request: Request) -> bool:
        return request.id % 2 == 1

    def masks(self, places: Sequence[Place]) -> list[Mask]:
        assert places and all(self.constrains(place.request) for place in places)
        self.open |= {(place.request.id, place.choice) for place in places}
        return [bytes([place.request.id, place.choice, len(place.tokens), *[0] * 5]) for place in places]

    def forget(self, request: int, choice: int) -> None:
        self.open.discard((request, choice))


PLACES = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 1), st.lists(st.integers(29, END), max_size=6)), min_size=1, max_size=8
)


@given(st.lists(PLACES, min_size=1, max_size=3), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(max_examples=150, deadline=None)
def test_each_place_of_a_batch_has_its_own_mask(steps: list[list[tuple[int, int, list[int]]]], has: list[bool]) -> None:
    """A thought that has to end goes before what else constrains a request, and neither reaches another place."""
    budget = request(1, is_open=True).params
    asked = [
        Request(number, (1, OPEN, 2), budget if has[number] else SamplingParams(max_tokens=100)) for number in range(4)
    ]
    others = Grammars()
    maker = ThoughtBudgets(VOCAB, others)
    assert [maker.constrains(each) for each in asked] == [has[number] or number % 2 == 1 for number in range(4)]
    for step in steps:
        places = [Place(asked[number], choice, [*asked[number].prompt, *output]) for number, choice, output in step]
        for place, mask in zip(places, maker.masks(places), strict=True):
            (free,) = ThoughtBudgets(VOCAB, NoGrammars()).masks([place])
            is_free = free == b"\xff" * len(free)
            assert mask == (Grammars().masks([place])[0] if is_free and others.constrains(place.request) else free)
    for number in range(4):
        for choice in range(2):
            maker.forget(number, choice)
    assert not maker._choices and not others.open
