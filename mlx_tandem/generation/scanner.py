"""Reading text that arrives in pieces, for parsers that must not depend on how it is cut.

A parser is a routine: a generator that reads a scanner, yields events, and yields None where it needs more text. Each
step of a routine is decided by the text alone, so the events are the same for every split. The work is linear in the
text. Most characters are looked at once. Characters that may become a marker, and those that a routine looks at ahead,
are looked at again, and so is the text of a call that failed, up to a bound.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta, ToolCallArguments

T = TypeVar("T")

Routine = Generator[Said | None, None, T]
"""A part of a parser. It yields events, and None where it needs more text."""

SPACE = re.compile(r"[ \t\r\n]+")
MOST_SPACES_AHEAD = 4096
"""Most white space that is passed over in looking for what follows."""


class Malformed(Exception):
    """Raised inside a parser for text that does not have the form it should have."""


class Markers:
    """A set of texts to look for. Where several begin at the same character, the longest counts."""

    def __init__(self, *texts: str):
        self.texts = texts
        ordered = sorted(set(texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self.firsts = frozenset(text[0] for text in ordered)
        self.beginnings = frozenset(text[:n] for text in ordered for n in range(1, len(text)))
        self.longest = max(map(len, ordered), default=1)


NOWHERE = Markers()
"""No markers, for reading a text to its end."""


class Scanner:
    """The text of one choice that has arrived and was not read yet.

    `scanned` counts the characters that were looked at, and `read` those that were read. While text is held, the
    scanner keeps what is read, so that it can be read again.
    """

    __slots__ = ("_at", "_before", "_mark", "_text", "ended", "read", "scanned")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._mark = -1  # where the held text begins in `_text`; -1: none is held
        self._before: list[str] = []  # held text that is no longer in `_text`
        self.ended = False
        self.scanned = 0
        self.read = 0

    def feed(self, text: str) -> None:
        """Add the next piece of text."""
        if self._mark >= 0:
            if self._mark < self._at:
                self._before.append(self._text[self._mark : self._at])
            self._mark = 0
        self._text = self._text[self._at :] + text if self._at < len(self._text) else text
        self._at = 0

    def try_skip(self, text: str) -> bool:
        """Return whether `text` can be passed over, because nothing is unread or held; count it if so."""
        if self._mark >= 0 or self._at < len(self._text):
            return False
        self.scanned += len(text)
        self.read += len(text)
        return True

    def hold(self) -> None:
        """Keep everything that is read from here on, and nothing that was read before."""
        self._before.clear()
        self._mark = self._at

    @property
    def held(self) -> int:
        """The number of characters that were read since `hold`."""
        return sum(map(len, self._before)) + self._at - self._mark if self._mark >= 0 else 0

    def release(self) -> str:
        """Keep nothing any more; return what was kept."""
        if self._mark < 0:
            return ""
        held = "".join((*self._before, self._text[self._mark : self._at]))
        self._before.clear()
        self._mark = -1
        return held

    def unread(self) -> None:
        """Take back everything that was read since `hold`, so that it is read again; keep nothing any more."""
        if self._mark < 0:
            return
        self.read -= self.held
        if self._before:
            self._text = "".join((*self._before, self._text[self._mark :]))
            self._mark = 0
            self._before.clear()
        self._at = self._mark
        self._mark = -1

    def upto(self, markers: Markers) -> tuple[str, str | None]:
        """Read the text before the next marker and the marker; return both.

        Without a whole marker, read and return the text that belongs to none, with None.
        """
        text, at, size = self._text, self._at, len(self._text)
        if at == size:
            return "", None
        match = markers.pattern.search(text, at)
        end = size if match is None else match.start()
        self.scanned += end - at + 1
        if not self.ended:
            for start in range(max(at, size - markers.longest + 1), end + (match is not None)):
                self.scanned += 1
                if text[start] in markers.firsts and text[start:] in markers.beginnings:
                    return self._take(start), None
        read = self._take(end)
        return (read, None) if match is None else (read, self._take(match.end()))

    def peek(self, ahead: int = 0, size: int = 1) -> str:
        """Return `size` characters from the one `ahead` of the next without reading them; fewer where there are not
        as many.
        """
        at = self._at + ahead
        return self._text[at : at + size]

    def span(self, pattern: re.Pattern[str], most: int) -> str:
        """Read and return up to `most` of the next characters as far as `pattern` matches them."""
        match = pattern.match(self._text, self._at, self._at + most)
        if match is None:
            return ""
        self.scanned += match.end() - self._at
        return self._take(match.end())

    def back(self, size: int) -> None:
        """Take back the last `size` characters, which were read in one step."""
        self._at -= size
        self.read -= size

    def skip(self) -> None:
        """Read one character."""
        self.scanned += 1
        self._take(self._at + 1)

    def _take(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        self.read += len(text)
        return text


class RoutineParser(ABC):
    """A parser of one choice's text, whose routine is the method `read`."""

    def __init__(self, choice: int):
        self.choice = choice
        self.scan = Scanner()
        self.cut = False
        self._steps: Iterator[Said | None] = self.read()
        self._waits: tuple[frozenset[str], Callable[[str], Sequence[Said]]] | None = None
        """Where the routine waits for a marker: the characters that begin one, and what text before it becomes."""

    @abstractmethod
    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""

    def push(self, text: str) -> Sequence[Said]:
        """Return the events that the next piece of text completes."""
        waits = self._waits
        if (
            waits is not None and waits[0].isdisjoint(text) and self.scan.try_skip(text)
        ):  # Fast path of almost every piece.
            return waits[1](text) if text else ()
        self.scan.feed(text)
        return self._events()

    def flush(self, *, cut: bool = False) -> list[Said]:
        """Return the events for the text that was held back. No more text follows.

        `cut` says that something else than the model has ended the text, such as a limit of tokens.
        """
        self.scan.ended = True
        self.cut = cut
        return self._events()

    def _events(self) -> list[Said]:
        """Return the events up to the point where the routine needs more text. Adjacent pieces become one event."""
        groups: list[tuple[Said, list[str]]] = []
        for event in self._steps:
            if event is None:
                break
            piece = _piece(event)
            if groups and _continues(groups[-1][0], event):
                groups[-1][1].append(piece)
            else:
                groups.append((event, [piece]))
        return [event if len(pieces) == 1 else _joined(event, "".join(pieces)) for event, pieces in groups]

    # -- parts of routines --------------------------------------------------------------------------------------

    def text(self, text: str) -> Sequence[Said]:
        """Return the events of text that belongs to the answer."""
        return (TextDelta(self.choice, text),) if text else ()

    def upto(self, markers: Markers, say: Callable[[str], Sequence[Said]]) -> Routine[str | None]:
        """Read the text before the next marker and the marker; yield what `say` makes of the text.

        Return the marker; None when the text has ended without one.
        """
        while True:
            text, marker = self.scan.upto(markers)
            if text:
                yield from say(text)
            if marker is not None or self.scan.ended:
                return marker
            self._waits = markers.firsts, say
            yield None
            self._waits = None

    def peek(self, ahead: int = 0, size: int = 1) -> Routine[str]:
        """Return `size` characters from the one `ahead` of the next without reading them; fewer at the text's end."""
        while len(text := self.scan.peek(ahead, size)) < size and not self.scan.ended:
            yield None
        self.scan.scanned += len(text)
        return text

    def ahead(self, texts: Sequence[str], start: int = 0) -> Routine[tuple[str | None, int]]:
        """Return which of `texts` comes next behind white space, and how far ahead it begins, without reading it.

        `start` is the number of characters that are passed over first. The text is empty where the answer ends, and
        None where none of `texts` comes next, or more than MOST_SPACES_AHEAD spaces.
        """
        while True:
            space = SPACE.match(unread := self.scan.peek(start, MOST_SPACES_AHEAD))
            spaces = space.end() if space is not None else 0
            if len(unread) < MOST_SPACES_AHEAD and spaces == len(unread) and not self.scan.ended:
                yield None
                continue
            at = start + spaces
            following = self.scan.peek(at, max(map(len, texts), default=1))
            is_begun = not following or any(text != following and text.startswith(following) for text in texts)
            if is_begun and not self.scan.ended:
                yield None
                continue
            self.scan.scanned += spaces + 1
            if not following:
                return "", at
            return next((text for text in texts if following.startswith(text)), None), at

    def span_ahead(self, pattern: re.Pattern[str], most: int, start: int = 0) -> Routine[str]:
        """Return up to `most` characters as far as `pattern` matches them, without reading them.

        `start` is the number of characters that are passed over first.
        """
        end = start
        while end - start < most and pattern.match((yield from self.peek(end))):
            end += 1
        return self.scan.peek(start, end - start)

    def span(self, pattern: re.Pattern[str], most: int) -> Routine[str]:
        """Read and return characters as far as `pattern` matches. Raises Malformed for more than `most` of them."""
        pieces: list[str] = []
        while pattern.match((yield from self.peek())):
            if not most:
                raise Malformed
            pieces.append(self.scan.span(pattern, most))
            most -= len(pieces[-1])
        return "".join(pieces)

    def skip_space(self) -> Routine[None]:
        """Read spaces and line breaks, any number of them."""
        while (yield from self.peek()) and self.scan.span(SPACE, 1 << 30):
            pass

    def expect(self, text: str) -> Routine[None]:
        """Read exactly `text`. Raises Malformed at the first character that differs, which is not read."""
        for character in text:
            if (yield from self.peek()) != character:
                raise Malformed
            self.scan.skip()


def _piece(event: Said) -> str:
    """Return the text of an event."""
    match event:
        case TextDelta() | ReasoningDelta():
            return event.text
        case ToolCallArguments():
            return event.arguments
    return ""


def _continues(before: Said, event: Said) -> bool:
    """Return whether both events are pieces of the same text."""
    if isinstance(event, ToolCallArguments):
        return isinstance(before, ToolCallArguments) and before.call == event.call
    return type(event) is type(before) and isinstance(event, TextDelta | ReasoningDelta)


def _joined(event: Said, text: str) -> Said:
    """Return the event with all of the text of its pieces."""
    match event:
        case ToolCallArguments():
            return ToolCallArguments(event.choice, event.call, text)
        case ReasoningDelta():
            return ReasoningDelta(event.choice, text)
    return TextDelta(event.choice, text)
