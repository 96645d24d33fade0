"""Thoughts between two markers, such as <think> and </think>."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mlx_tandem.generation.events import ReasoningDelta, Said
from mlx_tandem.generation.scanner import SPACE, Markers, Routine, RoutineParser

MOST_SPACES = 8
"""Most white space at the end of a thought that is left out."""


@dataclass(frozen=True)
class Thoughts:
    """The form of a family's thoughts.

    A thought begins with `open` and ends with `close`, or at one of `enders`, which belong to the answer. `variants`
    are other spellings of `open`, each with that of `close`. With `always_opened`, answers begin inside a thought even
    if neither the prompt nor the model has written `open`. `dropped` are marks of the answer that are no part of it.
    `closing` is what ends a thought whose budget is spent; empty if the family's thoughts cannot be ended.
    """

    open: str
    close: str
    variants: tuple[tuple[str, str], ...] = ()
    enders: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
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

    @cached_property
    def markers_of_answers(self) -> Markers:
        """The texts before which a piece of an answer ends."""
        return Markers(*self.opens, *self.dropped)

    @cached_property
    def markers_of_thoughts(self) -> Markers:
        """The texts before which a piece of a thought ends."""
        return Markers(*self.closes, *self.enders)

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that the parser looks for."""
        return (*self.opens, *self.closes, *self.enders, *self.dropped)

    def is_opened(self, prompt: str) -> bool:
        """Return whether an answer to a prompt with this end begins inside a thought."""
        end = prompt.rstrip()
        return end.endswith(self.open.rstrip()) or (self.always_opened and not end.endswith(self.close))


class ThoughtParser(RoutineParser):
    """A parser of thoughts. White space at both ends of a thought, and behind it, means nothing."""

    def __init__(self, choice: int, form: Thoughts, *, opened: bool = False):
        """Begin a choice, inside a thought if it is `opened`."""
        super().__init__(choice)
        self._form = form
        self._opened = opened
        self._spaces = ""

    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""
        if not self._opened:
            self._spaces = yield from self._first_spaces()
            if not (yield from self._until_thought()):
                return
        while True:
            yield from self.skip_space()
            self._spaces = ""
            closer = yield from self.upto(self._form.markers_of_thoughts, self._thought)
            if closer is None:
                return
            yield from self.skip_space()
            self._spaces = closer if closer in self._form.enders else ""
            if not (yield from self._until_thought()):
                return

    def _first_spaces(self) -> Routine[str]:
        """Read up to MOST_SPACES before an answer, which mean nothing if a thought follows."""
        read = ""
        while len(read) < MOST_SPACES and SPACE.match((yield from self.peek())):
            read += self.scan.span(SPACE, MOST_SPACES - len(read))
        return read

    def _until_thought(self) -> Routine[bool]:
        """Read the answer up to the next thought; return whether there is one."""
        while True:
            marker = yield from self.upto(self._form.markers_of_answers, self._said)
            if marker is None:
                kept, self._spaces = self._spaces, ""
                yield from self.text(kept)
                return False
            if marker in self._form.opens:
                return True
            yield from self.skip_space()

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
