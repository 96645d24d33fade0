"""Writing a pattern that begins with look-aheads as several patterns without any, which a text has to match all.

Libraries write such patterns: zod for addresses, durations and host names, pydantic for decimal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

_NEGATIVE = {
    r"^[-+.]*$": r"[^-+.]",
    r"\.": r"^(?:[^.]|$)",
    r".*\.\.": r"^(?:\.?[^.])*\.?$",
}
"""For what a negative look-ahead forbids at the beginning of a text: a pattern of the texts that are left."""

_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
_SECONDS = r"\d+(?:[.,]\d+)?S"
_TIME = rf"T(?:\d+H(?:\d+M)?(?:{_SECONDS})?|\d+M(?:{_SECONDS})?|{_SECONDS})"
_DATE = r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)"

_WHOLE = {_DURATION: rf"^P(?:\d+W|{_DATE}(?:{_TIME})?|{_TIME})$"}
"""Patterns with look-aheads at other places, and what they mean."""


def without_lookaheads(pattern: str) -> list[str]:
    """Return patterns without leading look-aheads that match together what this one matches; itself if it has none.

    Look-aheads that are not known stay where they are.
    """
    if pattern in _WHOLE:
        return [_WHOLE[pattern]]
    rest, found = pattern.removeprefix("^"), []
    while rest != pattern and rest.startswith(("(?=", "(?!")):
        end = next((at for at, depth in _depths(rest) if depth == 0), None)
        if end is None:
            return [pattern]
        inner, is_negative = rest[3:end], rest[2] == "!"
        if is_negative and inner not in _NEGATIVE:
            return [pattern]
        found.append(_NEGATIVE[inner] if is_negative else f"^(?:{inner})")
        rest = rest[end + 1 :]
    is_choice = any(depth == 0 and rest[at] == "|" for at, depth in _depths(rest))
    return [pattern] if not found or is_choice else [*found, f"^{rest}"]


def _depths(pattern: str) -> Iterator[tuple[int, int]]:
    """Yield the place of each parenthesis and bar outside of classes, and how many groups are open behind it."""
    depth, at, in_class = 0, 0, False
    while at < len(pattern):
        char = pattern[at]
        if char == "\\":
            at += 1
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()|":
            depth += {"(": 1, ")": -1, "|": 0}[char]
            yield at, depth
        at += 1
