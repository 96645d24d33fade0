"""Keeping the text of control tokens inside messages apart from the control tokens that a template prints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlx_tandem.text.parts import Part

PRIVATE = range(0xF0000, 0xFFFFE)
"""Characters that mean nothing by themselves (Unicode's private use plane 15)."""


class Shields:
    """Stands a private-use character in for each control token's text inside given values while they are rendered.

    Templates may trim, split or join what they print, so the text itself has to travel through them. A private-use
    character survives that, and what it stands for is then encoded without control tokens.
    """

    def __init__(self, specials: Iterable[str], values: Mapping[str, Any]):
        """`specials` are the texts of the control tokens; `values` what the template is given, of plain data."""
        names = sorted(filter(None, specials), key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._text_of: dict[str, str] = {}
        self.values = values
        """The values with every control token's text replaced."""
        if pattern is None or not any(pattern.search(text) for text in _texts(values)):
            return
        used = set().union(*map(set, _texts(values)))
        free = (c for c in map(chr, PRIVATE) if c not in used)
        character_of: dict[str, str] = {}

        def stand_in(match: re.Match[str]) -> str:
            text = match.group()
            if text not in character_of:
                character_of[text] = next(free)
            return character_of[text]

        self.values = _mapped(values, lambda text: pattern.sub(stand_in, text))
        self._text_of = {c: t for t, c in character_of.items()}

    def split(self, text: str) -> list[Part]:
        """Return what was rendered in parts, with the texts of control tokens back in their places, as plain parts."""
        if not self._text_of:
            return [(text, False)]
        parts: list[Part] = []
        for part in re.split(f"([{''.join(self._text_of)}]+)", text):
            if part:
                plain = part[0] in self._text_of
                parts.append(("".join(self._text_of[c] for c in part) if plain else part, plain))
        return parts


def _texts(value: Any) -> Iterable[str]:
    """Yield every string in a value of plain data, keys of mappings included."""
    todo = [value]
    while todo:
        item = todo.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list | tuple):
            todo += item


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value of plain data with every string in it changed, keys of mappings included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(k, change): _mapped(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value
