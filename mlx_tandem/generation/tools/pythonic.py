"""Calls in Python's notation: [name(key=value, ...), ...]. Llama 3.2, Llama 4 and LFM2 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import ClassVar

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.literals import LiteralParser

_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_PIECE = 1 << 16
_HALVES = range(0xD800, 0xE000)


class PythonicParser(LiteralParser):
    """A parser of lists of calls. Without an opener, an answer may begin with such a list of offered functions."""

    openers = Markers("<|python_start|>", "<|python_tag|>")
    closer = "<|python_end|>"
    others = ("<|python_end|>",)
    starts = "["
    word_characters = re.compile(r"[A-Za-z0-9_.+-]+")
    words: ClassVar[Mapping[str, str]] = {
        "True": "true",
        "False": "false",
        "None": "null",
        "true": "true",
        "false": "false",
        "null": "null",
    }

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one list."""
        yield from self.gap()
        yield from self.expect("[")
        following = ","
        while following == ",":
            yield from self.gap()
            name = yield from self.name()
            yield from self.expect("(")
            if not opener and name not in self.tools.functions:
                raise Malformed
            yield from self.begin(name)
            yield from self.arguments("{")
            yield from self.pairs(")", "=")
            self.end()
            yield from self.gap()
            following = yield from self.choose(",", "]")
            self.end()
        if opener:
            yield from self.passed(self.closer)

    def string(self, first: str) -> Routine[bool]:
        """Read a text between single or double quotes."""
        if first not in ("'", '"'):
            return False
        self.scan.skip()
        yield from self.arguments('"')
        while True:
            following = yield from self.peek()
            if following == first:
                self.scan.skip()
                yield from self.arguments('"')
                return True
            if following == "\\":
                self.scan.skip()
                text = yield from self._escaped()
            elif following:
                text = self.scan.span(_PLAIN[first], _PIECE)
            else:
                raise Malformed
            if text:
                yield from self.arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escaped(self) -> Routine[str]:
        """Read what follows a backslash; return what it stands for."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self.scan.skip()
        digits = ""
        for _ in range(_CODES.get(character, 0)):
            if not _HEX.match((yield from self.peek())):
                break
            digits += self.scan.span(_HEX, 1)
        if digits and len(digits) == _CODES[character] and int(digits, 16) <= 0x10FFFF:
            code = int(digits, 16)
            return "\ufffd" if code in _HALVES else chr(code)
        if character in "\\'\"":
            return character
        return _ESCAPES.get(character, f"\\{character}{digits}")


class LfmParser(PythonicParser):
    """A parser of LFM2's calls, which are between markers."""

    openers = Markers("<|tool_call_start|>")
    closer = "<|tool_call_end|>"
    others = ("<|tool_call_end|>",)
    starts = ""
