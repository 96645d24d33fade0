"""Thoughts between two markers, such as <think> and </think>."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta, ToolCallStart
from mlx_tandem.generation.scanner import NOWHERE, SPACE, Markers, Routine, RoutineParser
from mlx_tandem.generation.tools.calls import LONGEST_KEPT, CallParser

MOST_SPACES = 8
"""Most white space at the end of a thought that is left out."""


@dataclass(frozen=True)
class Thoughts:
    """The form of a family's thoughts.

    A thought begins with `open` and ends with `close`, or at one of `enders`, which belong to the answer. `variants`
    are other spellings of `open`, each with that of `close`. With `always_opened`, answers begin inside a thought even
    if neither the prompt nor the model has written `open`. `frame` are the marks at both ends of the answer that are
    no part of it.
    `closing` is what ends a thought whose budget is spent; empty if the family's thoughts cannot be ended.
    """

    open: str
    close: str
    variants: tuple[tuple[str, str], ...] = ()
    enders: tuple[str, ...] = ()
    frame: tuple[str, ...] = ()
    always_opened: bool = False
    closing: str = ""

    @property
    def opens(self) -> tuple[str, ...]:
        """All texts that begin a thought."""
        return (self.open, *(first for first, _ in self.variants))

    @property
    def closes(self) -> tuple[str, ...]:
        """All texts that end a thought and belong to it."""
        return (self.close, *(last for _, last in self.variants))

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that the parser looks for."""
        return (*self.opens, *self.closes, *self.enders, *self.frame)

    def is_opened(self, prompt: str) -> bool:
        """Return whether an answer to a prompt with this end begins inside a thought."""
        end = prompt.rstrip()
        return end.endswith(self.open.rstrip()) or (self.always_opened and not end.endswith(self.close))


class ThoughtParser(RoutineParser):
    """A parser of the thoughts with which an answer begins. What follows them is text, whatever it holds.

    White space at both ends of a thought, and behind it, means nothing. A call ends a thought that has no end of its
    own: with `calls`, which makes a parser of calls, a call in a thought is kept until the thought or the text ends.
    """

    def __init__(
        self, choice: int, form: Thoughts, *, opened: bool = False, calls: Callable[[], CallParser] | None = None
    ):
        """Begin a choice, inside a thought if it is `opened`."""
        super().__init__(choice)
        self._form = form
        self._opened = opened
        self._calls = calls
        self._closers = (*form.closes, *form.enders)
        openers = calls().openers.texts if calls is not None else ()
        self._in_thoughts = Markers(*self._closers, *(text for text in openers if text not in self._closers))
        self._ends = Markers(*self._closers)
        self._spaces = ""

    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""
        form = self._form
        self._spaces = "" if self._opened else (yield from self._first_spaces())
        is_thought = self._opened or bool((yield from self._next(form.opens)))
        while is_thought:
            yield from self._read_thought()
            is_thought = bool((yield from self._next(form.opens)))
        if form.frame:
            yield from self._framed(*form.frame)
        else:
            yield from self.upto(NOWHERE, self._said)
        yield from self.text(self._spaces)

    def _first_spaces(self) -> Routine[str]:
        """Read up to MOST_SPACES before an answer, which mean nothing if a thought follows."""
        read = ""
        while len(read) < MOST_SPACES and SPACE.match((yield from self.peek())):
            read += self.scan.span(SPACE, MOST_SPACES - len(read))
        return read

    def _next(self, texts: Sequence[str]) -> Routine[str]:
        """Read one of `texts` and the white space behind it, if one comes next; return it."""
        found, at = yield from self.ahead(texts)
        if not found or at:
            return ""
        yield from self.expect(found)
        yield from self.skip_space()
        self._spaces = ""
        return found

    def _read_thought(self) -> Routine[None]:
        """Read a thought that has begun, its end and the white space behind it.

        The marker of its beginning may be repeated, and so may that of its end.
        """
        yield from self.skip_space()
        while (yield from self._next(self._form.opens)):
            pass
        while True:
            marker = yield from self.upto(self._in_thoughts, self._thought)
            if marker is not None and marker not in self._closers:
                marker = yield from self._try_calls(marker)
                if marker == "":
                    continue
            if marker is None:
                self._spaces = ""
                return
            if marker in self._form.enders:
                self._spaces = marker
                return
            yield from self.skip_space()
            self._spaces = ""
            while (yield from self._next(self._form.closes)):
                pass
            return

    def _try_calls(self, opener: str) -> Routine[str | None]:
        """Read on behind the beginning of a call inside of a thought.

        Return the marker that ends the thought, to which all that was read belongs. Return an empty string if what was
        read is no call and the thought goes on, and None at the end of the text, where a call is said as one.
        """
        assert self._calls is not None
        parser, pieces, said = self._calls(), [opener], list[Said]()
        parser.is_at_line = False  # An empty section belongs to the thought.
        size = plain = 0  # the characters of all that was read, and of what is text to the parser of calls
        text, marker = opener, None
        while True:
            if text:
                events = parser.push(text)
                said += events
                size += len(text)
                plain += sum(len(event.text) for event in events if isinstance(event, TextDelta))
            text, marker = self.scan.upto(self._ends)
            pieces.append(text)
            if marker is not None or (self.scan.ended and not text):
                break
            if text:
                continue
            if plain == size or size > LONGEST_KEPT:
                yield from self._thought("".join(pieces))
                return ""
            yield None
        if marker is None:
            said += parser.flush(cut=self.cut)
            first = next((k for k, event in enumerate(said) if isinstance(event, ToolCallStart)), None)
            if first is not None:
                for event in said[:first]:
                    yield from self._thought(event.text if isinstance(event, TextDelta) else "")
                yield from said[first:]
                return None
        yield from self._thought("".join(pieces))
        return marker

    def _framed(self, first: str, last: str) -> Routine[None]:
        """Read the answer between two marks. Only at its ends are they left out."""
        yield from self._next((first,))
        while (yield from self.upto(Markers(last), self._said)) is not None:
            if (yield from self.ahead(()))[0] == "":
                yield from self.skip_space()
                return
            yield from self._said(last)

    def _said(self, text: str) -> Sequence[Said]:
        """Return the event for a part of the answer, behind what was kept."""
        kept, self._spaces = self._spaces, ""
        return self.text(kept + text)

    def _thought(self, text: str) -> Sequence[Said]:
        """Return the event for a part of a thought. Up to MOST_SPACES at its end are kept until more of it follows."""
        text = self._spaces + text
        end = max(len(text.rstrip(" \t\r\n")), len(text) - MOST_SPACES)
        self._spaces = text[end:]
        return (ReasoningDelta(self.choice, text[:end]),) if end else ()
