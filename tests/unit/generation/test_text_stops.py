from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_tandem.generation.stops import StopScanner

SMALL = st.text("ab", min_size=1, max_size=5)


def expected(text: str, stops: list[str], spare: int = 0, include: bool = False) -> tuple[str, str | None]:
    """The stop string that is complete first after `spare` characters, the longest of those that end there."""
    for end in range(spare + 1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - (0 if include else len(longest))], longest
    return text, None


def scan(parts: list[str], stops: list[str], spare: int = 0, include: bool = False) -> tuple[str, str | None]:
    """`spare`: parts that no stop string may end in."""
    scanner = StopScanner(stops, include=include)
    shown = ""
    for i, part in enumerate(parts):
        scanner.armed = i >= spare
        shown += scanner.push(part)
    return shown + scanner.flush(), scanner.hit


@given(st.lists(st.text("ab", max_size=6), max_size=8), st.lists(SMALL, min_size=1, max_size=4))
@example(["aba", "b"], ["abb", "ab"])
@example(["a", "abcd"], ["abcd", "bc"])
@settings(max_examples=500)
def test_any_splitting_gives_the_same_result(parts, stops):
    text = "".join(parts)
    assert scan(parts, stops) == scan([text], stops) == scan(list(text), stops) == expected(text, stops)


@given(st.lists(st.text("ab", max_size=4), max_size=8), st.lists(SMALL, min_size=1, max_size=4), st.integers(0, 6))
@example(["a", "ab", "a", "bb"], ["aabab", "abb"], 3)
@settings(max_examples=500)
def test_what_is_completed_while_unarmed_is_passed_over(parts, stops, spare):
    """A stop string may begin there, though."""
    for include in (False, True):
        want = expected("".join(parts), stops, len("".join(parts[:spare])), include)
        assert scan(parts, stops, spare, include) == want


@given(st.lists(st.text("abc", max_size=4), max_size=8), st.lists(SMALL, min_size=1, max_size=3))
def test_what_was_shown_is_never_part_of_a_stop_string(parts, stops):
    scanner = StopScanner(stops)
    shown = ""
    for part in parts:
        shown += scanner.push(part)
        assert expected("".join(parts), stops)[0].startswith(shown)


def test_only_the_possible_beginning_is_held_back():
    scanner = StopScanner(["END"])
    assert scanner.push("the E") == "the "
    assert scanner.push("N") == ""
    assert scanner.push("x") == "ENx"
    assert scanner.push("ENDED") == ""
    assert scanner.hit == "END"
    assert scanner.push("more") == ""


@pytest.mark.promise("D3")
def test_nothing_is_looked_at_twice():
    """The worst case for a scan of the tail: every character extends the match."""
    reads = 0

    class Counting(str):
        def __getitem__(self, index):
            nonlocal reads
            reads += isinstance(index, int)
            return str.__getitem__(self, index)

    scanner = StopScanner(["a" * 255 + "b"])
    scanner._stops = tuple(map(Counting, scanner._stops))
    for _ in range(2000):
        scanner.push("a")
    assert reads <= 2000 * 4
