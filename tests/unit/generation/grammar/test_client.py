"""Constraints are compiled once each, by all that they say, and errors name the field."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.errors import InvalidRequest
from mlx_tandem.generation.grammar import client
from mlx_tandem.generation.grammar.client import Constraints
from mlx_tandem.generation.grammar.constraint import (
    Call,
    Calls,
    Constraint,
    OneOf,
    Pattern,
    Rules,
    Schema,
    Thought,
)
from mlx_tandem.generation.grammar.messages import Answer, Compiled, Refused, decode_constraint
from mlx_tandem.isolation.process import Lost
from mlx_tandem.limits import MAX_GRAMMAR_BYTES
from tests.api.scripted import INFO


class Pool:
    """Takes the place of the processes: the grammar of a constraint is its number."""

    answer: Answer | Lost | None = None

    def __init__(self, *_: Any):
        self.asked: list[Constraint] = []

    async def ask(self, item: bytes) -> Answer | Lost:
        self.asked.append(decode_constraint(item))
        return self.answer or Compiled(f"grammar {len(self.asked)}")


@pytest.fixture
def constraints(monkeypatch: pytest.MonkeyPatch) -> Constraints:
    monkeypatch.setattr(client, "WorkerPool", Pool)
    return Constraints(Path("folder"), lambda: INFO)


def asked(constraints: Constraints) -> list[Constraint]:
    return constraints._pool.asked if constraints._pool is not None else []  # type: ignore[attr-defined]


CALLS = Calls((Call("a", Schema(b"{}"), "b"),))
ALL = [
    Constraint(Pattern("a"), "guided_regex"),
    Constraint(Pattern("b"), "guided_regex"),
    Constraint(Pattern("a"), "structured_outputs.regex"),
    Constraint(Rules("a"), "guided_grammar"),
    Constraint(OneOf(("a", "b")), "guided_choice"),
    Constraint(OneOf(("b", "a")), "guided_choice"),
    Constraint(Schema(b"{}"), "response_format"),
    Constraint(Schema(b"{}", "response_format.schema"), "response_format"),
    Constraint(Schema(b"{}", is_lenient=True), "response_format"),
    Constraint(Schema(b"{}"), "response_format", is_compact=True),
    Constraint(Schema(b"{}"), "response_format", thought=Thought("</think>")),
    Constraint(Schema(b"{}"), "response_format", thought=Thought("</think>", "<think>")),
    Constraint(Schema(b"{}"), "response_format", calls=CALLS),
    Constraint(CALLS, "tools"),
    Constraint(Calls(CALLS.calls, separator="\n"), "tools"),
    Constraint(Calls(CALLS.calls, trigger="a"), "tools"),
]


def test_each_is_compiled_once_by_all_that_it_says(constraints: Constraints) -> None:
    async def run() -> None:
        first = [await constraints.grammar(constraint) for constraint in ALL]
        assert [grammar.text.decode() for grammar in first] == [f"grammar {i + 1}" for i in range(len(ALL))]
        assert [grammar.param for grammar in first] == [constraint.param for constraint in ALL]
        assert asked(constraints) == ALL
        assert [await constraints.grammar(constraint) for constraint in reversed(ALL)] == first[::-1]
        assert len(asked(constraints)) == len(ALL)

    asyncio.run(run())


def test_those_that_were_used_last_are_kept(constraints: Constraints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_KEPT", 3)

    async def run() -> None:
        for i in (0, 1, 2, 0, 3):  # the fourth takes the place of number 1, which was not used for longest
            await constraints.grammar(ALL[i])
        assert len(asked(constraints)) == 4
        for i in (0, 2, 3):
            await constraints.grammar(ALL[i])
        assert len(asked(constraints)) == 4
        await constraints.grammar(ALL[1])
        assert asked(constraints)[4:] == [ALL[1]]

    asyncio.run(run())


@pytest.mark.promise("E6")
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60)), max_size=40))
@settings(max_examples=60)
def test_the_bytes_of_those_that_are_kept_are_bounded(uses: list[tuple[int, int]]) -> None:
    """The grammar that was used last is kept if it fits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "WorkerPool", Pool)
        patch.setattr(client, "MOST_KEPT_BYTES", 50)
        constraints = Constraints(Path("folder"), lambda: INFO)

        async def run() -> None:
            for number, size in uses:
                patch.setattr(Pool, "answer", Compiled("x" * size))
                grammar = await constraints.grammar(Constraint(Pattern(str(number)), "guided_regex"))
                kept = constraints._kept.values()
                assert sum(map(len, kept)) == constraints._kept_bytes <= 50
                assert grammar.text in kept or len(grammar.text) > 50

        asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "says", "param"),
    [
        (
            Refused("the keyword not cannot be enforced", "response_format.schema.not"),
            "response_format.schema.not: the keyword",
            ".schema.not",
        ),
        (Refused("no"), "response_format: no", ""),
        (Lost("timeout"), "response_format takes too long to compile", ""),
        (Lost("memory"), "response_format needs more than 512 MB of memory to compile", ""),
        (Lost("died"), "response_format cannot be compiled", ""),
    ],
)
def test_a_failure_names_the_field_and_is_not_kept(
    constraints: Constraints, monkeypatch: pytest.MonkeyPatch, answer: Any, says: str, param: str
) -> None:
    async def run() -> None:
        monkeypatch.setattr(Pool, "answer", answer)
        with pytest.raises(InvalidRequest) as refused:
            await constraints.grammar(ALL[6])
        assert refused.value.message.startswith(says)
        assert refused.value.param == f"response_format{param}"
        monkeypatch.setattr(Pool, "answer", None)
        assert (await constraints.grammar(ALL[6])).text == b"grammar 2"

    asyncio.run(run())


def test_the_largest_constraint_and_half_a_character(constraints: Constraints) -> None:
    async def run() -> None:
        room = MAX_GRAMMAR_BYTES - len(client.encode(Constraint(Pattern("x" * 100_000), "p"))) + 100_000
        await constraints.grammar(Constraint(Pattern("x" * room), "p"))
        for wrong, says in (("x" * (room + 1), f"over the limit of {MAX_GRAMMAR_BYTES} bytes"), ("\ud800", "half a")):
            with pytest.raises(InvalidRequest, match=says) as refused:
                await constraints.grammar(Constraint(Pattern(wrong), "p"))
            assert refused.value.param == "p"
        assert len(asked(constraints)) == 1

    asyncio.run(run())
