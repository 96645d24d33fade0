"""The table of promises and the tests that show them name each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\| ([A-Z]+-?[0-9]+) \| ([^|]+) \|([^|]*)\|")


def rows(text: str) -> Iterator[tuple[str, str]]:
    """Each id with the reason why no test shows it; empty: tests do."""
    for line in text.splitlines():
        if found := ROW.fullmatch(line):
            yield found[1], found[3].strip()


def marked(source: str) -> Iterator[str]:
    """The ids of the marks in a module of tests."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.promise":
            for argument in node.args:
                assert isinstance(argument, ast.Constant), "an id is written out"
                yield argument.value


def faults(table: Mapping[str, str], found: set[str]) -> list[str]:
    """Return the ids for which the table and the marks disagree, each with how they do."""
    told = [f"{id} has no test, and no reason" for id, why in table.items() if not why and id not in found]
    told += [f"{id} has a test, and a reason why it has none" for id, why in table.items() if why and id in found]
    return told + [f"{id} is not in the table" for id in sorted(found - table.keys())]


@cache
def everything() -> tuple[dict[str, str], set[str]]:
    listed = list(rows((TESTS / "promises.md").read_text(encoding="utf-8")))
    assert len(dict(listed)) == len(listed), "each id once"
    sources = (file.read_text(encoding="utf-8") for file in TESTS.rglob("test_*.py"))
    return dict(listed), {id for source in sources if "mark.promise" in source for id in marked(source)}


def test_every_promise_has_a_test_or_a_reason() -> None:
    table, found = everything()
    assert len(table) > 100
    assert not faults(table, found)


def test_every_row_of_the_table_is_read() -> None:
    lines = (TESTS / "promises.md").read_text(encoding="utf-8").splitlines()
    written = [line for line in lines if line.startswith("| ") and not line.startswith("| id ")]
    assert len(written) == len(everything()[0])


@pytest.mark.parametrize(
    ("table", "source", "told"),
    [
        ({"A1": ""}, '@pytest.mark.promise("A1")\ndef test_x(): ...', []),
        ({"A1": "", "A2": "not built"}, 'TestX = pytest.mark.promise("A1")(X)', []),
        ({"A1": ""}, "def test_x(): ...", ["A1 has no test, and no reason"]),
        ({"A1": "not built"}, 'pytest.mark.promise("A1")(X)', ["A1 has a test, and a reason why it has none"]),
        ({}, '@pytest.mark.promise("A1")\ndef test_x(): ...', ["A1 is not in the table"]),
    ],
)
def test_what_does_not_agree_is_told(table: dict[str, str], source: str, told: list[str]) -> None:
    assert faults(table, set(marked(source))) == told
