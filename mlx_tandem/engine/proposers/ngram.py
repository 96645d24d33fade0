"""Drafts from a sequence's own tokens: what followed the last time when the newest tokens stood there before.

The index grows with the sequence. It keeps one place for each token, linked to the place before with the same few
tokens before it, so that adding a token and finding a match both take bounded time.
"""

from __future__ import annotations

from collections.abc import Sequence

CANDIDATES = 8
"""Earlier places that are compared, the latest first."""

INDEXED_AT_ONCE = 4096
"""Most tokens that are added in one call, so that a long prompt does not hold up the loop."""


class NgramIndex:
    """The places in one sequence where its newest tokens may have stood before.

    Args:
        shortest: The fewest tokens that have to agree.
        longest: The most tokens that are compared; of several places the one that agrees longest counts.
        first: Tokens before this one are not indexed.
    """

    def __init__(self, shortest: int, longest: int, first: int = 0):
        self._shortest = shortest
        self._longest = longest
        self._first = first
        self._next = first + shortest  # the next place to add
        self._latest: dict[tuple[int, ...], int] = {}  # by the tokens before it, the last place
        self._before: list[int] = []  # of each place, the earlier one with the same tokens before it, or -1

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens that are new since the last call, INDEXED_AT_ONCE at most."""
        end = min(len(tokens), self._next + INDEXED_AT_ONCE)
        for place in range(self._next, end):
            key = tuple(tokens[place - self._shortest : place])
            self._before.append(self._latest.get(key, -1))
            self._latest[key] = place
        self._next = max(self._next, end)

    def find(self, text: Sequence[int], end: Sequence[int], expected: int = -1) -> tuple[int, int]:
        """Return the place in `text` that follows the longest match with the end of `end`, and the match's length.

        `text` is what was indexed. The place `expected` is compared before all others. The length is 0 where nothing
        matches.
        """
        best, length = -1, self._agreement(text, end, expected) if self._first < expected <= len(text) else 0
        if length >= self._shortest:
            best = expected
        else:
            length = 0
        place = self._latest.get(tuple(end[-self._shortest :]), -1)
        for _ in range(CANDIDATES):
            if place < 0 or length >= self._longest:
                break
            agrees = self._agreement(text, end, place)
            if agrees > length:
                best, length = place, agrees
            place = self._before[place - self._first - self._shortest]
        return best, length

    def _agreement(self, text: Sequence[int], end: Sequence[int], place: int) -> int:
        """Return how many tokens before `place` in `text` are those at the end of `end`."""
        most = min(self._longest, place - self._first, len(end))
        return next((n for n in range(most) if text[place - 1 - n] != end[-1 - n]), most)

    @staticmethod
    def copy(tokens: Sequence[int], place: int, skip: int, most: int) -> list[int]:
        """Return `most` tokens from `place + skip` on; what lies behind the end repeats from there."""
        period = len(tokens) - place
        return [tokens[place + (skip + n) % period] for n in range(most)]
