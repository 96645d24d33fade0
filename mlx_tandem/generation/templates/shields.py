"""Telling control tokens that a template prints from texts of control tokens inside messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from mlx_tandem.generation.parts import Part

PRIVATE = range(0xF0000, 0xFFFFE)
"""Code points of characters without a meaning of their own (Unicode's private use plane 15)."""


class Unprinted(Exception):
    """The error for a template that does not print the last message although the prompt has to end with it."""


class _Specials(NamedTuple):
    """The texts of the control tokens: a pattern that finds them, and all proper prefixes of them."""

    pattern: re.Pattern[str] | None
    beginnings: frozenset[str]
    longest: int  # characters of the longest beginning


@lru_cache(maxsize=8)
def _specials(names: tuple[str, ...]) -> _Specials:
    """Return the pattern and the prefixes for these texts of control tokens."""
    ordered = sorted(filter(None, names), key=len, reverse=True)
    beginnings = frozenset(name[:end] for name in ordered for end in range(1, len(name)))
    pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
    return _Specials(pattern, beginnings, max(map(len, beginnings), default=0))


class Shields:
    """The values of a template's variables, with private-use characters in place of the texts of control tokens.

    Templates may trim, split or join texts, so the replacement has to survive inside the text, as a private-use
    character does. After rendering, `split` puts the texts back as plain parts, which encode to no control token. A
    value may also end with the beginning of a control token, which the template's next text would complete. Another
    character replaces that beginning, and it becomes a plain part only where it would complete a control token.
    """

    def __init__(self, specials: tuple[str, ...], values: Mapping[str, Any], *, continues: bool = False):
        """Replace the texts of control tokens, `specials`, in `values`, which are plain data.

        With `continues` the prompt ends with the content of the last message.
        """
        self._specials = _specials(specials)
        self._free = _free_characters(values)
        self._of_special: dict[str, str] = {}  # the characters, by what they stand for
        self._of_beginning: dict[str, str] = {}
        self.values: dict[str, Any] = {
            key: [self._message(m) for m in value] if key == "messages" else self._changed(value)
            for key, value in values.items()
        }
        """The values with every control token's text replaced."""
        self._end = next(self._free) if continues else ""
        if continues:
            messages = self.values["messages"]
            messages[-1] = {**messages[-1], "content": _ended(messages[-1]["content"], self._end)}

    def split(self, text: str) -> list[Part]:
        """Return the rendered text in parts, in which the texts of control tokens are back as plain parts.

        Raises Unprinted when the prompt has to end with the last message and the text does not have it.
        """
        if self._end:
            text, found, _ = text.rpartition(self._end)
            if not found:
                raise Unprinted
            text = text.replace(self._end, "")
        specials = {c: t for t, c in self._of_special.items()}
        beginnings = {c: t for t, c in self._of_beginning.items()}
        characters = "".join([*specials, *beginnings])
        parts: list[Part] = []
        ahead = ""  # the text behind the current part, up to the next plain part
        for part in reversed(re.split(f"([{characters}])", text) if characters else [text]):
            piece = specials.get(part) or beginnings.get(part) or part
            plain = part in specials or (part in beginnings and self._makes_special(piece, ahead))
            ahead = "" if plain else (piece[: self._specials.longest] + ahead)[: self._specials.longest]
            if piece:
                parts.append((piece, plain))
        return [("".join(p for p, _ in group), plain) for plain, group in groupby(parts[::-1], key=itemgetter(1))]

    def _message(self, message: Any) -> Any:
        """Return a message with its texts replaced. The role stays, because it is one of a fixed set of words."""
        if not isinstance(message, Mapping):
            return self._changed(message)
        return {self._shield(k): v if k == "role" else self._changed(v) for k, v in message.items()}

    def _changed(self, value: Any) -> Any:
        return _changed(value, self._shield, self._shield_all)

    def _makes_special(self, beginning: str, ahead: str) -> bool:
        """Return whether a control token starts inside `beginning` when `ahead` follows it."""
        assert self._specials.pattern is not None
        match = self._specials.pattern.search(beginning + ahead)
        return match is not None and match.start() < len(beginning)

    def _shield(self, text: str) -> str:
        """Return the text with each control token's text replaced by a character."""
        if self._specials.pattern is None:
            return text
        return self._specials.pattern.sub(lambda match: self._character(self._of_special, match.group()), text)

    def _shield_all(self, text: str) -> str:
        """Return the text with each control token's text, and the beginning of one at its end, replaced."""
        text = self._shield(text)
        kept = text.rstrip()  # Templates may trim the text.
        for n in range(min(self._specials.longest, len(kept)), 0, -1):
            if kept[-n:] in self._specials.beginnings:
                return kept[:-n] + self._character(self._of_beginning, kept[-n:]) + text[len(kept) :]
        return text

    def _character(self, known: dict[str, str], text: str) -> str:
        """Return the character that replaces `text`, which is a new one if `text` is not in `known`."""
        if text not in known:
            known[text] = next(self._free)
        return known[text]


def _ended(content: Any, end: str) -> Any:
    """Return the content of a message, which is a text or a list of parts, with `end` behind its text."""
    if isinstance(content, str):
        return content + end
    if not content or "text" not in content[-1]:  # nothing, or an image
        return [*content, {"type": "text", "text": end}]
    return [*content[:-1], {**content[-1], "text": content[-1]["text"] + end}]


def texts(value: Any) -> Iterator[str]:
    """Yield every string in a value of plain data, including the keys of mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from texts(key)
            yield from texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts(inner)


def _changed(value: Any, of_key: Callable[[str], str], of_text: Callable[[str], str]) -> Any:
    """Return a value of plain data with `of_key` applied to each key and `of_text` to each other text."""
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Mapping):
        return {of_key(k) if isinstance(k, str) else k: _changed(inner, of_key, of_text) for k, inner in value.items()}
    return [_changed(inner, of_key, of_text) for inner in value] if isinstance(value, list | tuple) else value


def _free_characters(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield private-use characters that do not occur in the values. The values are searched on first use."""
    used = set().union(*map(set, texts(values)))
    yield from (c for c in map(chr, PRIVATE) if c not in used)
