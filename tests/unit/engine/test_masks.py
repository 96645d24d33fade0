"""The tokens that masks are made for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_tandem.engine.masks import ExtendedTokens

TOKENS = st.lists(st.integers(0, 9), max_size=8)
BOUND = st.none() | st.integers(-20, 20)


@given(TOKENS, TOKENS, BOUND, BOUND)
def test_extended_tokens_are_read_as_a_list_is(
    first: list[int], rest: list[int], begin: int | None, end: int | None
) -> None:
    joined, extended = first + rest, ExtendedTokens(first, tuple(rest))
    assert list(extended) == joined and len(extended) == len(joined)
    assert extended[begin:end] == joined[begin:end]
    assert [extended[at] for at in range(-len(joined), len(joined))] == joined * 2
