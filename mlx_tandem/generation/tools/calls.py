"""The base of all parsers of tool calls."""

from __future__ import annotations

import re
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mlx_tandem.generation.events import Said, ToolCallArguments, ToolCallStart
from mlx_tandem.generation.scanner import Malformed, Markers, Routine, RoutineParser
from mlx_tandem.generation.tools.offer import NAME, Tools

NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:/-]+")
LONGEST_NAME = 128
LONGEST_GAP = 256
"""Most spaces between the parts of a call before its arguments."""

_GAP = re.compile(r"[ \t\r\n]+")
_QUOTED = re.compile(r'[^"\\\x00-\x1f]+')


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

    `calls` reads what follows an opener. Until a call has begun, a failure turns the opener and what was read behind it
    into text. A call that fails later ends where it fails, and what follows is text again. White space behind a call
    means nothing.
    """

    openers: ClassVar[Markers]
    others: ClassVar[tuple[str, ...]] = ()
    """Markers besides the openers, as far as they may be special tokens."""
    form: ClassVar[CallForm | None] = None
    """The form that calls are written in; None if the arguments are not JSON."""

    starts: ClassVar[str] = ""
    """Characters at which an answer may begin with a call that has no opener. Only names that the request offers count
    there.
    """

    def __init__(self, choice: int, tools: Tools):
        super().__init__(choice)
        self.tools = tools
        self._call = -1

    @abstractmethod
    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls behind `opener`. Raises Malformed."""

    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""
        if self.starts:
            yield from self._attempt("")
        while (opener := (yield from self.upto(self.openers, self.text))) is not None:
            yield from self._attempt(opener)

    def _attempt(self, opener: str) -> Routine[None]:
        """Read what follows an opener, as calls or as text. Without an opener, only `starts` may follow."""
        before = self._call
        self.scan.hold(opener)
        try:
            if opener or self._begins((yield from self.gap())):
                yield from self.calls(opener)
        except Malformed:
            pass
        yield from self.text(self.scan.release())
        if self._call != before:
            yield from self.skip_space()

    def _begins(self, character: str) -> bool:
        """Return whether a call without an opener may begin with this character."""
        return bool(character) and character in self.starts

    # -- parts of calls -----------------------------------------------------------------------------------------

    def new_id(self, name: str) -> str:
        """Return an id for the call that begins."""
        return f"call_{secrets.token_hex(12)}"

    def begin(self, name: str, id: str = "") -> Sequence[Said]:
        """Return the event of a call that begins. What was read for it cannot become text any more."""
        if not NAME.fullmatch(name):
            raise Malformed
        self._call += 1
        self.scan.release()
        return (ToolCallStart(self.choice, self._call, id or self.new_id(name), name),)

    def arguments(self, text: str) -> Sequence[Said]:
        """Return the event of a piece of the arguments of the call that has begun."""
        return (ToolCallArguments(self.choice, self._call, text),)

    def end(self) -> None:
        """End a call or a part of it that is complete. What is read from here on becomes text in a failure."""
        self.scan.hold()

    def gap(self) -> Routine[str]:
        """Read white space inside a call; return the character behind it, an empty string at the end of the text."""
        yield from self.span(_GAP, LONGEST_GAP)
        return (yield from self.peek())

    def name(self) -> Routine[str]:
        """Read the name of a function. Raises Malformed without one."""
        name = yield from self.span(NAME_CHARACTERS, LONGEST_NAME)
        if not name:
            raise Malformed
        return name

    def quoted(self) -> Routine[str]:
        """Read a short JSON string without escapes; return its content."""
        yield from self.expect('"')
        text = yield from self.span(_QUOTED, LONGEST_NAME)
        yield from self.expect('"')
        return text

    def choose(self, *texts: str) -> Routine[str]:
        """Read one of `texts`, none of which begins with another; return it. Raises Malformed where none continues."""
        read = ""
        while True:
            following = yield from self.peek()
            texts = tuple(text for text in texts if following and text.startswith(read + following))
            if not texts:
                raise Malformed
            self.scan.skip()
            read += following
            if read == texts[0]:
                return read

    def json_arguments(self) -> Routine[None]:
        """Read the arguments of the call that has begun, which are a JSON object, and end the call."""
        if (yield from self.gap()) != "{":
            raise Malformed
        yield from self.json(self.arguments)
        self.end()

    def passed(self, closer: str) -> Routine[bool]:
        """Read `closer` behind white space if it is there; return whether it was. Other text stays unread."""
        first = yield from self.gap()
        if first != closer[0]:
            return False
        yield from self.expect(closer)
        self.end()
        return True
