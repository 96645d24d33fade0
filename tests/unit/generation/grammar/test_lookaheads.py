"""Patterns with look-aheads mean the same as those that are written in their place."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.grammar.lookaheads import without_lookaheads
from tests.json_schemas import LOOKAHEADS

MORE = (
    "^(?=.*[0-9])(?=[a(|)]{1,3})\\w*$",
    "^(?=a|b)[a-z.]+$",
    "^(?=(a|b))a",
    "(?=a)a1?",
    "^(?=\\))\\)",
)
PARTS = [
    "a",
    "b",
    ".",
    "..",
    "-",
    "+",
    "@",
    "a.com",
    "P",
    "1",
    "T",
    "12",
    "W",
    "Y",
    "M",
    "D",
    "H",
    "S",
    "0",
    ",",
    "'",
    ")",
]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
def test_a_text_matches_all_of_them_or_not_the_pattern(text: str) -> None:
    for pattern in LOOKAHEADS + MORE:
        parts = without_lookaheads(pattern)
        matched = [bool(re.search(part, text)) for part in parts]
        if pattern.startswith("^"):
            assert parts != [pattern] and not any("(?=" in part or "(?!" in part for part in parts)
            assert all(matched) == bool(re.search(pattern, text)), (pattern, parts)


@pytest.mark.parametrize(
    "pattern", ["", "a", "^a", "^(?=a)b|c", "^(?!x)a", "^(?=a", "^(?=[)a", "^a(?=b)", "(?<=a)b", "^(?<n>a)"]
)
def test_other_patterns_stay_as_they_are(pattern: str) -> None:
    assert without_lookaheads(pattern) == [pattern]
