"""Calls whose arguments are literals of another notation than JSON, converted to JSON while they arrive."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from mlx_tandem.generation.json_text import JsonText
from mlx_tandem.generation.scanner import Malformed, Routine
from mlx_tandem.generation.tools.calls import LONGEST_GAP, LONGEST_NAME, CallParser

_KEY = re.compile(r"[A-Za-z0-9_.$-]+")
_MOST_DEPTH = 32


class LiteralParser(CallParser):
    """The base of parsers of numbers, texts, words, lists and objects in a family's own notation."""

    word_characters: ClassVar[re.Pattern[str]]
    words: ClassVar[Mapping[str, str]] = {"true": "true", "false": "false", "null": "null"}
    """The words that are no texts, and what they are in JSON."""
    bare_texts: ClassVar[bool] = False
    """Whether other words are texts. Otherwise they break the call."""

    @abstractmethod
    def string(self, first: str) -> Routine[bool]:
        """Read a text, if one begins with the character `first`, and write it; return whether one began."""

    def value(self, depth: int = 0) -> Routine[None]:
        """Read one value and write it as JSON. Raises Malformed."""
        first = yield from self.gap()
        if depth > _MOST_DEPTH:
            raise Malformed
        if first == "[":
            self.scan.skip()
            yield from self.arguments("[")
            yield from self._items("]", depth)
        elif first == "{":
            self.scan.skip()
            yield from self.arguments("{")
            yield from self._items("}", depth)
        elif not (yield from self.string(first)):
            yield from self._word()

    def pairs(self, closer: str, divider: str, depth: int = 0) -> Routine[None]:
        """Read pairs of a bare key and a value up to `closer`, and write them with the end of the object."""
        yield from self._items(closer, depth, divider)

    def _items(self, closer: str, depth: int, divider: str = ":") -> Routine[None]:
        """Read the items of a list or, unless `closer` ends a list, of an object; write them with their end."""
        opening = ""
        while True:
            following = yield from self.gap()
            if following == closer:
                self.scan.skip()
                yield from self.arguments("]" if closer == "]" else "}")
                return
            if opening:
                yield from self.expect(",")
                following = yield from self.gap()
                if following == closer:
                    continue
                yield from self.arguments(opening)
            opening = ", "
            if closer != "]":
                if not (yield from self.string(following)):
                    key = yield from self.span(_KEY, LONGEST_NAME)
                    if not key:
                        raise Malformed
                    yield from self.arguments(json.dumps(key))
                yield from self.gap()
                yield from self.expect(divider)
                yield from self.arguments(": ")
            yield from self.value(depth + 1)

    def _word(self) -> Routine[None]:
        """Read a number or a word and write it as JSON."""
        word = (yield from self.span(self.word_characters, LONGEST_GAP)).strip()
        if word in self.words:
            yield from self.arguments(self.words[word])
            return
        reader = JsonText()
        _, made = reader.read(word + " ", 0)
        if word and reader.state == "done":
            yield from self.arguments(made)
        elif word and self.bare_texts:
            yield from self.arguments(json.dumps(word, ensure_ascii=False))
        else:
            raise Malformed
