"""Reading values as models write them: JSON, Python's literals and what lies between, while the text arrives."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from mlx_tandem import limits
from mlx_tandem.generation.events import Said
from mlx_tandem.generation.scanner import SPACE, Malformed, Routine, RoutineParser
from mlx_tandem.generation.tools.json_writer import JsonWriter

QUOTES = ('"', "'")
DIVIDERS = (":", "=")
CLOSERS = {"{": "}", "[": "]", "(": ")"}
Items = Literal["pairs", "values", "arguments", "calls"]
"""The content of a bracket.

`pairs`: keys with values. `values`: values. `arguments`: pairs and values mixed. `calls`: calls in Python's notation.
"""

LONGEST_WORD = 1 << 20
"""Most characters of a key, and of a text without quotes."""

_LONGEST_KEY_AHEAD = 4096
_KEY = re.compile(r"[\w.$-]+")
_FUNCTION = re.compile(r"[\w.:/-]+")
_WORD = re.compile(r"[-+.\w]+")
_PLAIN_WORD = re.compile(r"[-+.\w ]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_OTHER_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?0[xXoObB][0-9a-fA-F_]+")
_WORDS = {
    "true": "true",
    "True": "true",
    "false": "false",
    "False": "false",
    "null": "null",
    "None": "null",
    "NaN": "null",
    "nan": "null",
    "Infinity": "null",
    "-Infinity": "null",
    "inf": "null",
    "-inf": "null",
}
"""Words that are values, and the JSON for each. Numbers that are not finite become null, as JSON has none."""
_PYTHON = ("True", "False", "None")

_PIECE = 1 << 16
_PREFIX = re.compile(r"[rbuf]|rb|br|rf|fr", re.IGNORECASE)
_PREFIXED = re.compile(r"[rbuf]{1,2}[\"']", re.IGNORECASE)
_HEX = re.compile(r"[0-9a-fA-F]+")
_CODES = {"x": 2, "u": 4, "U": 8}
_KEPT = frozenset('"\\/bfnrt')
_OCTAL = "01234567"
_OTHER_ESCAPES = {"'": "'", "a": "\\u0007", "v": "\\u000b", "\n": ""}
_CONTROL = {chr(c): f"\\u{c:04x}" for c in range(0x20)} | {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_PLAIN = {first: re.compile(rf'[^\\"{re.escape(first)}\x00-\x1f]+') for first in "\"'<"}


class Kept:
    """Pieces of text that are kept until it is known what they are, of `most` characters together."""

    def __init__(self, most: int):
        self._most = most
        self._size = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    def push(self, piece: str) -> Sequence[Said]:
        """Keep the next piece, and return no event. Raises Malformed for a text that is too long."""
        self._size += len(piece)
        if self._size > self._most:
            raise Malformed
        self._pieces.append(piece)
        return ()


class ValueReader:
    """A reader of one value, which it writes as JSON.

    It reads all JSON as it stands. It also reads Python's words and quotes, keys without quotes, `=` behind keys,
    surplus and missing commas, tuples and sets, numbers that are not finite (as null), and quotes, line breaks and
    backslashes in texts that are not escaped. A quote ends a text only where what follows can follow a value. Texts in
    a family's own `mark` are read as they stand.
    """

    def __init__(
        self,
        parser: RoutineParser,
        followers: Sequence[str] = (),
        *,
        mark: str = "",
        texts: Collection[str] = (),
        is_python: bool = False,
    ):
        """Read from `parser`. `followers` are the markers that may follow although something is still open.

        The values of the outermost keys `texts` are strings, even if they look like numbers and have no quotes.
        With `is_python`, texts have Python's prefixes and escapes.
        """
        self._parser = parser
        self._scan = parser.scan
        self._followers = tuple(followers)
        self._mark = mark
        self._texts = texts
        self._is_python = is_python
        self._has_equals = False  # whether `=` has divided a key from its value
        self.is_mended = False
        """Whether something was read that is neither JSON nor a literal of Python."""
        self._marks: tuple[str, ...] = (*((mark,) if mark else ()), *QUOTES)
        self.open: list[tuple[str, Items]] = []
        """The open brackets, innermost last: the closing character of each, and what it holds."""

    def value(self, out: JsonWriter, *, is_text: bool = False) -> Routine[None]:
        """Read one value. Raises Malformed where none begins, and when the text ends inside of it.

        With `is_text`, a word without quotes is a string even if it looks like a number.
        """
        out.space((yield from self.spaces()))
        first = yield from self._parser.peek()
        if not first or len(self.open) > limits.MAX_JSON_DEPTH:
            raise Malformed
        if first == "{":
            yield from self.object(out)
        elif first in CLOSERS:
            self.is_mended |= first == "("
            self._scan.skip()
            self.open.append((CLOSERS[first], "values"))
            yield from out.begin("[")
            yield from self.items(out)
        elif mark := (yield from self._opening()):
            yield from out.text_begin()
            yield from self._text(mark, out.text, self.follows)
            yield from out.text_end()
        elif self._is_python and (prefix := (yield from self._prefix())):
            for _ in prefix:
                self._scan.skip()
            mark = yield from self._opening()
            yield from out.text_begin()
            yield from self._text(mark, out.text, self.follows, is_raw="r" in prefix.lower())
            yield from out.text_end()
        elif first in ",}])" or (yield from self._parser.ahead(self._followers))[0]:
            raise Malformed
        elif self._mark and self._mark.startswith((yield from self._parser.peek(0, len(self._mark)))):
            yield from self._parser.expect(self._scan.peek(0, len(self._mark)))  # The text ends inside of the mark.
            raise Malformed
        else:
            yield from out.atom((yield from self._bare(is_text=is_text)))

    def object(self, out: JsonWriter, *, keyed: bool = False) -> Routine[None]:
        """Read an object, or a set, which becomes a list. Raises Malformed for a set if it must be `keyed`.

        Nothing is written before it is known which of the two it is.
        """
        self._scan.skip()
        self.open.append(("}", "arguments"))
        space = yield from self.spaces()
        first = yield from self._parser.peek()
        if first in ("}", ",") or not first:
            self.open[-1] = ("}", "pairs")
            yield from out.begin("{")
            out.space(space)
            yield from self.items(out)
            return
        key = yield from self._key(self._ends_first)
        if key and (yield from self._parser.ahead(DIVIDERS))[0] is not None:
            self.open[-1] = ("}", "pairs")
            yield from out.begin("{")
            out.space(space)
            yield from self._behind_key(key, out)
        elif keyed:
            raise Malformed
        else:
            self.is_mended = True
            self.open[-1] = ("}", "values")
            yield from out.begin("[")
            out.space(space)
            if key:
                yield from out.atom(key if key[0] == '"' else scalar(key) or quoted(key))
        yield from self.items(out)

    def items(self, out: JsonWriter) -> Routine[None]:
        """Read the rest of the innermost list or object, which has begun, and its end."""
        closer, items = self.open[-1]
        is_divided = not out.has_items
        while True:
            out.space((yield from self.spaces()))
            first = yield from self._parser.peek()
            if first == closer:
                self._scan.skip()
            elif first == ",":
                self.is_mended |= is_divided
                is_divided = True
                self._scan.skip()
                out.comma()
                continue
            elif not any(first == other for other, _ in self.open[:-1]):
                if not first:
                    raise Malformed
                self.is_mended |= not is_divided
                is_divided = False
                if items == "pairs":
                    yield from self.pair(out)
                else:
                    yield from self.value(out)
                continue
            # An outer closer, which stays unread, means that this bracket's own closer is missing.
            self.is_mended |= first != closer
            self.open.pop()
            yield from out.end()
            return

    def pair(self, out: JsonWriter) -> Routine[None]:
        """Read a key and its value. Raises Malformed where no key begins."""
        key = yield from self._key(self._divides)
        if not key:
            raise Malformed
        yield from self._behind_key(key, out)

    def key(self) -> Routine[str]:
        """Read a key and what divides it from its value; return it as text. Raises Malformed."""
        key = yield from self._key(self._divides)
        if not key:
            raise Malformed
        yield from self.spaces()
        divider = yield from self._parser.peek()
        if divider not in DIVIDERS:
            raise Malformed
        self._has_equals |= divider == "="
        self._scan.skip()
        return text_of(key) if key[0] == '"' else key

    def spaces(self) -> Routine[str]:
        """Read and return white space."""
        pieces: list[str] = []
        while SPACE.match((yield from self._parser.peek())):
            pieces.append(self._scan.span(SPACE, _PIECE))
        return "".join(pieces)

    def follows(self, start: int) -> Routine[bool]:
        """Return whether what comes `start` characters ahead can follow a complete value."""
        waiting = [closer for closer, _ in self.open]
        has_closed = False
        while waiting:
            begin = start
            found, at = yield from self._parser.ahead((*set(waiting), ",", *self._followers), start)
            start = at + 1
            if found in waiting:
                del waiting[len(waiting) - 1 - waiting[::-1].index(found) :]
                has_closed = True
            elif found == ",":
                return (yield from self._item_follows(start, len(waiting) - 1))
            else:
                return found is not None or (yield from self._undivided(begin, at, len(waiting) - 1, has_closed))
        return True

    def _undivided(self, begin: int, at: int, depth: int, has_closed: bool) -> Routine[bool]:
        """Return whether an item of what is open at `depth` comes `at` characters ahead, without a comma before it.

        It is a pair on a line of its own, or an object behind an object. White space begins `begin` characters ahead.
        """
        if self.open[depth][1] == "pairs":
            is_line = "\n" in self._scan.peek(begin, at - begin)
            return is_line and (yield from self._follows_key(at, self._dividers_of("pairs")))
        return has_closed and (yield from self._parser.peek(at)) == "{"

    def _dividers_of(self, items: Items) -> Sequence[str]:
        """Return what divides keys from values. In pairs, `=` counts only if it was read before."""
        return DIVIDERS if items == "arguments" or self._has_equals else DIVIDERS[:1]

    def key_follows(self) -> Routine[bool]:
        """Return whether a key and what divides it from a value come next."""
        return (yield from self._follows_key(0, DIVIDERS))

    def _item_follows(self, start: int, depth: int) -> Routine[bool]:
        """Return whether an item of what is open at `depth`, or its end, comes `start` characters ahead."""
        ended, at = yield from self._parser.ahead((), start)
        first = yield from self._parser.peek(at)
        closer, items = self.open[depth]
        if ended == "" or first in (closer, ","):
            return True
        if items in ("pairs", "arguments") and (yield from self._follows_key(at, self._dividers_of(items))):
            return True
        if items == "calls":
            return (yield from self._follows_key(at, ("(",), _FUNCTION))
        if items == "pairs":
            return False
        if first in "\"'{[(-+.0123456789" or (self._mark and first == self._mark[0]):
            return True
        word = yield from self._parser.peek(at, max(map(len, _WORDS)) + 1)
        match = _WORD.match(word)
        is_prefix = self._is_python and _PREFIXED.match(word) is not None
        return is_prefix or (match is not None and match.group() in _WORDS)

    def _follows_key(self, at: int, dividers: Sequence[str], word: re.Pattern[str] = _KEY) -> Routine[bool]:
        """Return whether a key and one of `dividers`, or the end of the text, come `at` characters ahead.

        `word` is the pattern of the characters of a key without quotes.
        """
        first = yield from self._parser.peek(at)
        mark = ""
        for each in self._marks:
            if first == each[0] and (yield from self._parser.peek(at, len(each))) == each:
                mark = each
        start = at = at + len(mark)
        while at - start < _LONGEST_KEY_AHEAD:
            character = yield from self._parser.peek(at)
            if not character:
                return True
            if not mark and not word.match(character):
                return at > start and (yield from self._parser.ahead(dividers, at))[0] is not None
            if character == "\n":
                return False
            if mark and (yield from self._parser.peek(at, len(mark))) == mark:
                return (yield from self._parser.ahead(dividers, at + len(mark)))[0] is not None
            at += 2 if character == "\\" and mark in QUOTES else 1
        return True

    def _divides(self, start: int) -> Routine[bool]:
        """Return whether a divider, or the end of the text, comes `start` characters ahead."""
        return (yield from self._parser.ahead(DIVIDERS, start))[0] is not None

    def _ends_first(self, start: int) -> Routine[bool]:
        """Return whether the text ahead can follow the first item of an object or a set."""
        return (yield from self._divides(start)) or (yield from self.follows(start))

    def _opening(self) -> Routine[str]:
        """Read the mark with which a text begins; return the one that ends it, or an empty string without a text."""
        first = yield from self._parser.peek()
        for mark in self._marks:
            if first == mark[0] and (yield from self._parser.peek(0, len(mark))) == mark:
                triple = mark in QUOTES and (yield from self._parser.peek(0, 3)) == mark * 3
                ending = mark * 3 if triple else mark
                yield from self._parser.expect(ending)
                return ending
        return ""

    def _prefix(self) -> Routine[str]:
        """Return the letters before a text in Python's notation, without reading them."""
        for size in (1, 2):
            text = yield from self._parser.peek(0, size + 1)
            if len(text) == size + 1 and text[-1] in QUOTES and _PREFIX.fullmatch(text[:-1]):
                return text[:-1]
        return ""

    def _key(self, ends: Callable[[int], Routine[bool]]) -> Routine[str]:
        """Read a key; return it as JSON, or as it stands if it has no quotes, or nothing where none begins."""
        kept = Kept(LONGEST_WORD)
        if mark := (yield from self._opening()):
            try:
                yield from self._text(mark, kept.push, ends)
            except Malformed:
                if not self._scan.ended or self._scan.peek():
                    raise
            return f'"{kept.text}"'
        self.is_mended = True
        return (yield from self._parser.span(_KEY, LONGEST_WORD))

    def _behind_key(self, key: str, out: JsonWriter) -> Routine[None]:
        """Write a key that was read, and read its value. A key without a value gets null."""
        out.key(key if key[0] == '"' else quoted(key))
        space = yield from self.spaces()
        following = yield from self._parser.peek()
        if not following:
            raise Malformed
        self.is_mended |= following != ":"
        self._has_equals |= following == "="
        if following in DIVIDERS:
            self._scan.skip()
            space = yield from self.spaces()
            if (yield from self._parser.peek()) not in (",", *CLOSERS.values()):
                out.space(space)
                yield from self.value(out, is_text=len(self.open) == 1 and key.strip('"') in self._texts)
                return
        self.is_mended = True
        yield from out.atom("null")
        out.space(space)

    def _text(
        self,
        mark: str,
        put: Callable[[str], Sequence[Said]],
        ends: Callable[[int], Routine[bool]],
        *,
        is_raw: bool = False,
    ) -> Routine[None]:
        """Read a text up to the mark that ends it, and write it with JSON's escapes.

        In a text that `is_raw`, backslashes stand for themselves. Raises Malformed for a text without an end.
        """
        raw = is_raw or mark == self._mark
        plain = _PLAIN[mark[0]]
        while True:
            first = yield from self._parser.peek()
            if not first:
                raise Malformed
            if first == mark[0] and (yield from self._parser.peek(0, len(mark))) == mark:
                if (yield from ends(len(mark))):
                    yield from self._parser.expect(mark)
                    return
                self.is_mended = True
                yield from put('\\"' if first == '"' else first)
                self._scan.skip()
            elif first == "\\" and not raw:
                self._scan.skip()
                yield from put((yield from self._escape(is_python=self._is_python or mark[0] == "'")))
            elif run := self._scan.span(plain, _PIECE):
                yield from put(run)
            else:
                self._scan.skip()
                yield from put(_CONTROL.get(first) or (f"\\{first}" if first in '"\\' else first))

    def _escape(self, *, is_python: bool) -> Routine[str]:
        """Read what follows a backslash; return the escape in JSON. A backslash that escapes nothing is a text.

        Python has more escapes than JSON.
        """
        first = yield from self._parser.peek()
        if not first:  # A limit may have cut the escape off.
            return "" if self._parser.cut else "\\\\"
        self._scan.skip()
        if first in _KEPT:
            return f"\\{first}"
        size = _CODES.get(first, 0) if is_python or first == "u" else 0
        digits = (yield from self._parser.peek(0, size)) if size else ""
        if size and len(digits) == size and _HEX.fullmatch(digits) and int(digits, 16) <= 0x10FFFF:
            yield from self._parser.expect(digits)
            return f"\\u{digits}" if first == "u" else json.dumps(chr(int(digits, 16)))[1:-1]
        if first == "'" or (is_python and first in _OTHER_ESCAPES):
            return _OTHER_ESCAPES[first]
        if is_python and first in _OCTAL:
            while len(first) < 3 and (following := (yield from self._parser.peek())) and following in _OCTAL:
                self._scan.skip()
                first += following
            return json.dumps(chr(int(first, 8)))[1:-1]
        return "\\\\" + (_CONTROL.get(first) or first)

    def _bare(self, *, is_text: bool) -> Routine[str]:
        """Read a word or a text without quotes; return it as JSON. With `is_text` it is always a string."""
        word = yield from self._parser.span(_WORD, LONGEST_WORD)
        following = yield from self._parser.peek()
        if following in ("", ",", "}", "]", ")", " ", "\t", "\r", "\n") and (made := scalar(word)) is not None:
            self.is_mended |= made != word and word not in _PYTHON
            return quoted(word) if is_text else made
        self.is_mended = True
        pieces, size, nested = [word], len(word), 0
        while following := (yield from self._parser.peek()):
            if not nested and (following == "\n" or (following in ",}])" and (yield from self.follows(0)))):
                break
            marker, at = yield from self._parser.ahead(self._followers)
            if marker and not at:
                break
            nested += following in "([{"
            nested -= bool(nested) and following in ")]}"
            pieces.append(self._scan.span(_PLAIN_WORD, LONGEST_WORD) or self._taken())
            size += len(pieces[-1])
            if size > LONGEST_WORD:
                raise Malformed
        text = "".join(pieces).strip()
        return quoted(text) if is_text else scalar(text) or quoted(text)

    def _taken(self) -> str:
        """Read and return one character."""
        character = self._scan.peek()
        self._scan.skip()
        return character


class _Whole(RoutineParser):
    """A parser of a text that is one value, or none."""

    def __init__(self, text: str):
        super().__init__(0)
        self.made: str | None = None
        self._kept = Kept(sys.maxsize)
        self.reader = ValueReader(self)
        self.scan.feed(text)
        self.flush()

    def read(self) -> Routine[None]:
        """Read the value."""
        try:
            yield from self.reader.value(JsonWriter(self._kept.push))
        except Malformed:
            return
        yield from self.skip_space()
        if not self.scan.peek():
            self.made = self._kept.text.strip()

    @property
    def beginning(self) -> str:
        """The part of the value that was written."""
        return self._kept.text


def as_json(text: str, *, strict: bool = False) -> str | None:
    """Return a whole text as JSON if it is one value, else None.

    If `strict`, it has to be JSON or a literal of Python as it stands, without anything to be mended.
    """
    whole = _Whole(text)
    return None if strict and whole.reader.is_mended else whole.made


def beginning_of(text: str) -> str:
    """Return a text that is the beginning of a value as JSON, as far as it is certain; nothing if it is none."""
    whole = _Whole(text)
    return whole.beginning if not whole.scan.peek() else ""


def scalar(word: str) -> str | None:
    """Return a word as a JSON number, true, false or null; None if it is none of them."""
    if len(word) > 64 and _NUMBER.fullmatch(word) is None:
        return None
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return "null" if "e" in word.lower() and not math.isfinite(float(word)) else word
    if _OTHER_NUMBER.fullmatch(word) is None:
        return None
    for base in (0, 10):  # the second one for zeros at the beginning
        try:
            return str(int(word, base))
        except ValueError:
            pass
    try:
        number = float(word)
    except ValueError:
        return None
    return repr(number) if math.isfinite(number) else "null"


def text_of(value: str) -> str:
    """Return the text that a JSON string stands for, without halves of surrogate pairs. Raises Malformed for another
    value.
    """
    text: object = json.loads(value)
    if not isinstance(text, str):
        raise Malformed
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def quoted(text: str) -> str:
    """Return a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
