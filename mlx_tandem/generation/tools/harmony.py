"""Messages of gpt-oss in the harmony format: thoughts, calls and the answer are messages in channels of their own."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta
from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser
from mlx_tandem.generation.tools.offer import NAME, Tools

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")

_LONGEST_HEADER = 256
_WORDS = ("assistant", "analysis", "commentary", "final")
_TYPES = ("json", "code", "text")
_LONGEST_WORD = 16
_HEADER_PART = re.compile(r"[^<]+")
_RECIPIENT = re.compile(rf"\bto=(?:functions\.)?({NAME.pattern})")
_IN_HEADER = re.compile(r"<\|\w+\|>|[^\s<]+")
_ROLE = re.compile(r"[a-z_.]{1,64}")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyParser(CallParser):
    """A parser of messages of the form start ROLE channel NAME to=functions.FUNCTION message TEXT end.

    Parts of this may be missing: an answer begins behind the first ROLE, and models forget ends. A message of the
    channel analysis is a thought, one to an offered function is a call, and any other is a part of the answer.
    """

    openers = Markers(_START, _CHANNEL, *_ENDS)
    extra_markers = (_MESSAGE, _CONSTRAIN)
    form = CallForm(f"{_CHANNEL}commentary to=functions.", f" {_CONSTRAIN}json{_MESSAGE}", "<|call|>")

    def __init__(self, choice: int, tools: Tools):
        super().__init__(choice, tools)
        self._said: set[type[Said]] = set()  # the kinds of messages that have come, each on a line of its own

    def read(self) -> Routine[None]:
        """Read the whole text of the choice."""
        opener: str | None = ""
        if (yield from self.peek()) != " ":  # else the first message may be to a function
            opener = yield from self.upto(self.openers, self.text)
        while opener is not None:
            if opener in _ENDS:
                opener = yield from self._between()
                continue
            self.scan.hold()
            try:
                header = yield from self._header(opener)
            except Malformed:
                yield from self.text(opener)
                self.scan.unread()
                opener = yield from self.upto(self.openers, self.text)
                continue
            self.scan.release()
            opener = yield from self._body(header)

    def calls(self, opener: str) -> Routine[None]:
        """Read nothing, since calls are messages like others."""
        yield from ()
        raise Malformed

    def _header(self, opener: str) -> Routine[str]:
        """Read a message's header up to its text; return the header."""
        header = opener
        if not opener:
            yield from self.expect(" to=")
            header = " to="
        while len(header) < _LONGEST_HEADER:
            header += yield from self.span(_HEADER_PART, _LONGEST_HEADER)
            marker = yield from self.accept(_CHANNEL, _MESSAGE, _CONSTRAIN)
            if not marker:
                raise Malformed
            if marker == _MESSAGE:
                if not _is_header(header):
                    raise Malformed
                return header
            header += marker
        raise Malformed

    def _body(self, header: str) -> Routine[str | None]:
        """Read a message's text and the marker behind it; return the marker."""
        recipient = _RECIPIENT.search(header)
        channel = _CHANNEL_NAME.search(header)
        if recipient is not None and recipient.group(1) in self.tools.functions:
            self.scan.hold()
            with contextlib.suppress(Malformed):
                yield from self._call_of(recipient.group(1))
            self.scan.unread()
            return (yield from self.upto(self.openers, self.text))
        is_thought = channel is not None and channel.group(1) == "analysis"
        kind = ReasoningDelta if is_thought else TextDelta
        is_first = True

        def say(text: str) -> Sequence[Said]:
            nonlocal is_first
            line = "\n" if is_first and kind in self._said else ""
            is_first = False
            self._said.add(kind)
            return (kind(self.choice, line + text),)

        return (yield from self.upto(self.openers, say))

    def _between(self) -> Routine[str | None]:
        """Read what stands between two messages, and the marker behind it; return the marker.

        A word of a header without its markers, which models write there, is left out.
        """
        kept: str | None = ""  # None: it is more than a word

        def keep(text: str) -> Sequence[Said]:
            nonlocal kept
            said = text if kept is None else kept + text
            kept = said if kept is not None and len(said) <= _LONGEST_WORD else None
            return self.text(said) if kept is None else ()

        marker = yield from self.upto(self.openers, keep)
        if kept and (marker is None or kept.strip() not in _WORDS):
            yield from self.text(kept)
        return marker

    def _call_of(self, name: str) -> Routine[None]:
        """Read the arguments of a call, which are an object or nothing. Raises Malformed."""
        fence = yield from self.accept("```json", "```")
        yield from self.object_or_nothing(name)
        if fence:
            yield from self.accept("```")
        yield from self.gap()
        self.checkpoint()


def _is_header(header: str) -> bool:
    """Return whether a header has nothing but a role, channels, recipients and a type of content."""
    before = _START if not header.startswith("<") else ""
    for word in _IN_HEADER.findall(header):
        is_marker = word.startswith("<|")
        is_named = (before == _START and _ROLE.fullmatch(word)) or (before == _CHANNEL and word.isalnum())
        if not (is_marker or is_named or word.startswith("to=") or word.lower() in (*_WORDS, *_TYPES)):
            return False
        before = word
    return True
