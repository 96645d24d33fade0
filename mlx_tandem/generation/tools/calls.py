"""The base of all parsers of tool calls."""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_tandem.generation.events import Said, ToolCallArguments, ToolCallStart
from mlx_tandem.generation.scanner import SPACE, Malformed, Markers, Routine, RoutineParser
from mlx_tandem.generation.tools.json_writer import JsonWriter
from mlx_tandem.generation.tools.offer import NAME, Tools
from mlx_tandem.generation.tools.values import ValueReader

NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/-]+")
LONGEST_NAME = 128
LONGEST_GAP = 4096
"""Most spaces between the parts of a call before its arguments."""
LONGEST_KEPT = 1 << 20
"""Most characters that are kept until it is known whether they are a call."""

_REREAD_FREELY = 1 << 12
"""Characters of an answer that may be read again, besides as many as there are in it."""


@dataclass(frozen=True)
class CallForm:
    """The text of a call around its name and its arguments, which are JSON: `before` name `middle` arguments `after`.

    `between` separates two calls of one answer.
    """

    before: str
    middle: str
    after: str
    between: str = ""


class CallParser(RoutineParser):
    """A parser that finds calls behind `openers` and leaves all other text as it is.

    `calls` reads what follows an opener. If reading fails before a call has begun, the opener becomes text and the text
    after it is read again. If it fails later, the call's arguments are completed and the text after the last complete
    part is read again. White space after a call is left out.
    """

    openers: ClassVar[Markers]
    closers: ClassVar[tuple[str, ...]] = ()
    """The markers that end what an opener begins. All of them may be missing."""
    extra_markers: ClassVar[tuple[str, ...]] = ()
    """Markers besides the openers and closers, as far as they may be special tokens."""
    mark: ClassVar[str] = ""
    """The family's own mark at both ends of a text in arguments."""
    inline: ClassVar[tuple[str, ...]] = ()
    """Openers that are part of the call itself. After these, only functions that the request offers count."""
    keeps_ids: ClassVar[bool] = False
    """Whether the ids in the JSON objects of calls are kept."""
    form: ClassVar[CallForm | None] = None
    """The form in which calls are enforced. None if calls of this family cannot be enforced."""

    starts: ClassVar[str] = ""
    """The first characters of calls that have no opener, which may only be at the beginning of an answer.

    There, only functions that the request offers count.
    """

    def __init__(self, choice: int, tools: Tools):
        super().__init__(choice)
        self.tools = tools
        self._call = -1
        self._reread = 0
        self.is_at_line = True  # whether the content ends with a line break, or is empty
        self._followers = (*self.openers.texts, *self.closers, *self.extra_markers)

    @abstractmethod
    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls behind `opener`, or an empty section that means nothing. Raises Malformed."""

    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""
        if self.starts:
            yield from self._attempt("")
        while (opener := (yield from self.upto(self.openers, self.text))) is not None:
            yield from self._attempt(opener)

    def _attempt(self, opener: str) -> Routine[None]:
        """Read what follows an opener, as calls or as text. Without an opener, only `starts` may follow."""
        before, is_part, is_read = self._call, opener in self.inline, False
        if is_part:
            self.scan.back(len(opener))
        self.scan.hold()
        try:
            while opener and not is_part and (yield from self.accept(opener)):
                pass
            if opener or self._begins((yield from self.gap())):
                yield from self.calls("" if is_part else opener)
                is_read = True
        except Malformed:
            pass
        is_text = self._call == before and not is_read
        if is_text and not is_part:
            yield from self.text(opener)
        if self._spend_reread():
            self.scan.unread()
            if is_text and is_part:
                yield from self.expect(opener)
                yield from self.text(opener)
        else:
            yield from self.text(self.scan.release())
        if not is_text:
            yield from self.skip_space()

    def _begins(self, character: str) -> bool:
        """Return whether a call without an opener may begin with this character."""
        return bool(character) and character in self.starts

    def _spend_reread(self) -> bool:
        """Count what is held as read again, and return whether that is still allowed.

        The text read again must stay below four times the length of the answer plus a constant, so that the work stays
        linear.
        """
        if not (held := self.scan.held):
            return True
        self._reread += held
        return self._reread <= 4 * self.scan.read + _REREAD_FREELY

    @property
    def call_count(self) -> int:
        """The number of calls so far."""
        return self._call + 1

    @property
    def is_at_end(self) -> bool:
        """Whether the whole text was read, but for white space."""
        return self.scan.ended and not self.scan.peek(0, LONGEST_GAP).strip(" \t\r\n")

    @property
    def is_cut(self) -> bool:
        """Whether the whole text was read, and something else than the model has ended it."""
        return self.cut and self.is_at_end

    # -- parts of calls -----------------------------------------------------------------------------------------

    def text(self, text: str) -> Sequence[Said]:
        """Return the events of text that belongs to the answer."""
        if text:
            self.is_at_line = text.endswith("\n")
        return super().text(text)

    def new_id(self, name: str) -> str:
        """Return an id for the call that begins."""
        return f"call_{secrets.token_hex(12)}"

    def begin(self, name: str, id: str = "") -> Sequence[Said]:
        """Return the event of a call that begins. What was read for it can no longer become text of the answer."""
        if not NAME.fullmatch(name):
            raise Malformed
        self._call += 1
        self.scan.release()
        return (ToolCallStart(self.choice, self._call, id or self.new_id(name), name),)

    def arguments(self, text: str) -> Sequence[Said]:
        """Return the event of a piece of the arguments of the call that has begun."""
        return (ToolCallArguments(self.choice, self._call, text),) if text else ()

    def checkpoint(self) -> None:
        """Note that a call, or a part of it, is complete. After a failure the text from here on is read again."""
        self.scan.hold()

    def complete(self, out: JsonWriter) -> Sequence[Said]:
        """Return the events that complete the arguments; none if something else than the model has ended the text."""
        return () if self.is_cut else out.complete()

    def object_or_nothing(self, name: str, id: str = "") -> Routine[None]:
        """Read a call's arguments, which are an object, or nothing where a marker or the end of the text follows."""
        if (yield from self.ahead(self._followers))[0] is None:
            yield from self.object(name, id, self.values())
            return
        yield from self.begin(name, id)
        yield from self.arguments("" if self.is_cut else "{}")
        self.checkpoint()

    def values(self, texts: Collection[str] = (), *, is_python: bool = False) -> ValueReader:
        """Return a reader of the values of one call. The values of the keys `texts` are known to be texts.

        `is_python` says that the call is in Python's notation.
        """
        return ValueReader(self, self._followers, mark=self.mark, texts=texts, is_python=is_python)

    def argument_writer(self, name: str, id: str = "", *, spaced: bool = False) -> JsonWriter:
        """Return a writer of the arguments of a call. The call begins with their first piece.

        With `spaced`, the white space in the arguments is the writer's own.
        """
        before = self._call

        def say(text: str) -> Sequence[Said]:
            begin = self.begin(name, id) if self._call == before else ()
            return (*begin, *self.arguments(text))

        return JsonWriter(say, spaced=spaced or bool(self.mark))

    def object(self, name: str, id: str, reader: ValueReader) -> Routine[None]:
        """Read a call's arguments, which are an object. Raises Malformed if there is no object.

        If the arguments break off, they are completed before Malformed is raised.
        """
        if (yield from self.gap()) != "{" or not NAME.fullmatch(name):
            raise Malformed
        out = self.argument_writer(name, id)
        yield from self.written(out, reader.object(out, keyed=True))

    def written(self, out: JsonWriter, reading: Routine[None]) -> Routine[None]:
        """Run a routine that reads the arguments of a call and writes them to `out`.

        Arguments that break off are completed; then Malformed is raised, too.
        """
        before = self._call
        try:
            yield from reading
        except Malformed:
            if self._call != before:
                yield from self.complete(out)
                self.checkpoint()
            raise
        self.checkpoint()

    def end_section(self, before: int) -> Routine[None]:
        """Read the closer of a section, which may be missing. There were `before` calls when the section began.

        An empty section on a line of its own is left out. Raises Malformed for any other section without a call.
        """
        closer = yield from self.accept(*self.closers)
        if self.call_count == before and not (closer and self.is_at_line):
            raise Malformed
        if closer:
            self.checkpoint()

    def gap(self) -> Routine[str]:
        """Read white space inside a call; return the character after it, or an empty string at the end of the text."""
        yield from self.span(SPACE, LONGEST_GAP)
        return (yield from self.peek())

    def name(self) -> Routine[str]:
        """Read the name of a function. Raises Malformed without one."""
        name = yield from self.span(NAME_CHARACTERS, LONGEST_NAME)
        if not name:
            raise Malformed
        return name

    def accept(self, *texts: str) -> Routine[str]:
        """Read and return one of `texts`, with the white space before it. If none comes next, read nothing."""
        found, at = yield from self.ahead(texts)
        if not found:
            return ""
        yield from self.span(SPACE, at)
        yield from self.expect(found)
        return found
