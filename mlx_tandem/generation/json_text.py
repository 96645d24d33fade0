"""Checking JSON that arrives in pieces, without building its value."""

from __future__ import annotations

import re
from typing import Literal

from mlx_tandem import limits

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'["\\/bfnrt]|u[0-9a-fA-F]{4}')
_WORD = re.compile(r"[-+.0-9A-Za-z]{1,64}")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")

_ESCAPE_LENGTH = 6
"""Most characters of an escape sequence."""

_CONTROL = {chr(c): f"\\u{c:04x}" for c in range(0x20)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}

State = Literal["value", "first_item", "first_key", "key", "colon", "more", "string", "done", "broken"]


class JsonText:
    """A reader of one JSON value. `state` is done behind the value, and broken at a character that cannot follow.

    Models write two things into strings that JSON does not allow, line breaks and backslashes that escape nothing. The
    reader mends both, so that what it returns is valid JSON. It holds back at most an unfinished number or escape.
    """

    __slots__ = ("_closers", "_is_key", "state")

    def __init__(self) -> None:
        self.state: State = "value"
        self._closers: list[str] = []
        self._is_key = False

    def read(self, text: str, at: int) -> tuple[int, str]:
        """Read `text` from `at`; return the position behind what was read, and what was read as valid JSON."""
        out: list[str] = []
        while self.state not in ("done", "broken"):
            end = self._string(text, at, out) if self.state == "string" else self._structure(text, at, out)
            if end == at:
                break
            at = end
        return at, "".join(out)

    def _structure(self, text: str, at: int, out: list[str]) -> int:
        """Read spaces, and the next character or word outside of strings; return the position behind it."""
        space = _SPACE.match(text, at)
        assert space is not None
        out.append(space.group())
        at = space.end()
        if at == len(text):
            return at
        character, state = text[at], self.state
        if state in ("value", "first_item") and character not in '"{[]},:':
            return self._word(text, at, out)
        if character == '"' and state not in ("colon", "more"):
            self._is_key = state in ("key", "first_key")
            self.state = "string"
        elif character in "{[" and state in ("value", "first_item") and len(self._closers) < limits.MAX_JSON_DEPTH:
            self._closers.append("}" if character == "{" else "]")
            self.state = "first_key" if character == "{" else "first_item"
        elif character == ":" and state == "colon":
            self.state = "value"
        elif character == "," and state == "more":
            self.state = "key" if self._closers[-1] == "}" else "value"
        elif self._closers and character == self._closers[-1] and state in ("more", "first_key", "first_item"):
            self._closers.pop()
            self._end_value()
        else:
            self.state = "broken"
            return at
        out.append(character)
        return at + 1

    def _word(self, text: str, at: int, out: list[str]) -> int:
        """Read a number, true, false or null, behind which another character has arrived."""
        word = _WORD.match(text, at)
        if word is not None and word.end() == len(text) and word.end() - at < 64:
            return at
        if word is None or _SCALAR.fullmatch(word.group()) is None:
            self.state = "broken"
            return at
        out.append(word.group())
        self._end_value()
        return word.end()

    def _string(self, text: str, at: int, out: list[str]) -> int:
        """Read a part of a string; return the position behind it."""
        if (plain := _PLAIN.match(text, at)) is not None:
            out.append(plain.group())
            at = plain.end()
        if at == len(text):
            return at
        character = text[at]
        if character == '"':
            out.append(character)
            if self._is_key:
                self.state = "colon"
            else:
                self._end_value()
            return at + 1
        if character != "\\":
            out.append(_CONTROL[character])
            return at + 1
        if (escape := _ESCAPE.match(text, at + 1)) is not None:
            out.append("\\" + escape.group())
            return escape.end()
        if len(text) - at < _ESCAPE_LENGTH and text[at + 1 : at + 2] in ("", "u"):
            return at
        out.append("\\\\")
        return at + 1

    def _end_value(self) -> None:
        self.state = "more" if self._closers else "done"
