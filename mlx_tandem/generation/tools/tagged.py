"""Calls whose parameters are tagged: Qwen 3 Coder, Seed, MiniMax and DeepSeek 3.2."""

from __future__ import annotations

import re
from typing import NamedTuple

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallParser
from mlx_tandem.generation.tools.parameters import Parameters

_LONGEST_TAG = 256
_IN_TAG = re.compile(r"[^<>\n]+")
_SAYS_TEXT = re.compile(r"""\sstring\s*=\s*["'](true|false)["']\Z""")


class _Tag(NamedTuple):
    """The content of an opening tag: a name, which may be an attribute, whether it closes itself, and whether its
    value is a text.
    """

    name: str
    is_attribute: bool
    is_closed: bool
    is_text: bool


def _tag_of(inner: str) -> _Tag | None:
    """Return what stands behind the beginning of an opening tag; None for something else."""
    text = inner.rstrip()
    if is_closed := text.endswith("/"):
        text = text[:-1].rstrip()
    if said := _SAYS_TEXT.search(text):
        text = text[: said.start()].rstrip()
    name = text.lstrip()
    if is_attribute := text[:1].isspace() and name.startswith("name"):
        name = name[len("name") :].lstrip()
    if not name.startswith("="):
        return None
    name = name[1:].strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1].strip()
    if not name or '"' in name or "'" in name:
        return None
    return _Tag(name, is_attribute, is_closed, said is not None and said[1] == "true")


class Tags(NamedTuple):
    """The tags of a family: `prefix` stands before all names, `call` and `parameter` are the names of the two tags.

    In a `framed` family, a line break at the beginning of a value belongs to the tag, and then also the one at its end.
    """

    call: str
    parameter: str = "parameter"
    prefix: str = ""
    framed: bool = False

    @property
    def call_opener(self) -> str:
        """The beginning of the tag that opens a call."""
        return f"<{self.prefix}{self.call}"

    @property
    def call_closer(self) -> str:
        """The tag that closes a call."""
        return f"</{self.prefix}{self.call}>"

    @property
    def opener(self) -> str:
        """The beginning of the tag that opens a parameter."""
        return f"<{self.prefix}{self.parameter}"

    @property
    def closer(self) -> str:
        """The tag that closes a parameter."""
        return f"</{self.prefix}{self.parameter}>"


FUNCTION = Tags("function", framed=True)
INVOKE = Tags("invoke")
DSML = Tags("invoke", prefix="｜DSML｜")
ALL = (FUNCTION, INVOKE, DSML)
OPENERS = {tags.call_opener: tags for tags in ALL}


class TaggedCall:
    """A reader of one call: a tag with the function's name, a tag for each parameter, and the tags that close them.

    A parameter's closing tag ends its value only where the next parameter, the end of the call or the end of the text
    follows. Models leave closing tags out. Then the next parameter's opening tag ends the value if the function has
    such a parameter and it was not there yet.
    """

    def __init__(self, parser: CallParser, tags: Tags, *, is_bare: bool):
        """Read from `parser`. A call without an outer tag `is_bare`.

        Such a call counts only for a function that the request offers, and if a parameter or the end of the call
        follows its opening tag.
        """
        self._parser = parser
        self._tags = tags
        self._is_bare = is_bare
        self._closers = Markers(
            *(f"{space}{tag}" for space in ("", "\n") for tag in (tags.closer, tags.opener, tags.call_closer))
        )
        self._call_ends = (*parser.closers, *parser.openers.texts, *OPENERS)
        self._parameters: Parameters | None = None
        self._is_framed = False  # whether the present value begins on a line of its own

    def read(self) -> Routine[None]:
        """Read the call behind the beginning of its tag. Raises Malformed where no call begins."""
        parser, tags = self._parser, self._tags
        name, _, is_closed, _ = yield from self._tag()
        if is_closed and (name in parser.tools.functions or not self._is_bare):
            yield from parser.begin(name)
            yield from parser.arguments("{}")
            parser.checkpoint()
            return
        following, _ = yield from parser.ahead((tags.opener, tags.call_closer, "{", *parser.closers))
        offered = name in parser.tools.functions
        if following is None or (self._is_bare and not (offered and following)) or (not following and not offered):
            raise Malformed
        if following == "{":
            yield from parser.gap()
            yield from parser.object(name, "", parser.values())
            yield from parser.accept(tags.call_closer)
            parser.checkpoint()
            return
        yield from parser.begin(name)
        self._parameters = Parameters(parser, name)
        try:
            yield from self._read_parameters(self._parameters)
        except Malformed:
            yield from self._parameters.close()
            raise
        yield from self._parameters.close()
        yield from parser.accept(tags.call_closer)
        parser.checkpoint()

    def _read_parameters(self, parameters: Parameters) -> Routine[None]:
        """Read the parameters up to the end of the call, which stays unread."""
        parser, tags = self._parser, self._tags
        closer = tags.closer
        while True:
            if closer == tags.call_closer:
                return
            if closer == tags.closer and not (yield from parser.accept(tags.opener)):
                return
            tag = yield from self._tag()
            self._is_framed = tags.framed and (yield from parser.peek()) == "\n"
            if self._is_framed:
                parser.scan.skip()
            closer = yield from parameters.value(
                tag.name, self._closers, self._ends, is_text=tag.is_text, is_framed=self._is_framed
            )

    def _tag(self) -> Routine[_Tag]:
        """Read the rest of an opening tag. Raises Malformed."""
        tag = _tag_of((yield from self._parser.span(_IN_TAG, _LONGEST_TAG)))
        if tag is None:
            raise Malformed
        yield from self._parser.expect(">")
        return tag

    def _ends(self, closer: str) -> Routine[bool]:
        """Return whether a tag that was read, perhaps with a line break before it, ends the value before it."""
        parser, tags = self._parser, self._tags
        tag = closer.lstrip("\n")
        if tag == tags.opener:
            if self._is_framed and tag == closer:
                return False  # in the middle of a line
            return (yield from self._parameter_follows(0, is_closed=False))
        ends = self._call_ends if tag == tags.call_closer else (tags.opener, tags.call_closer, *self._call_ends)
        found, at = yield from parser.ahead(ends)
        if found == tags.opener:
            return (yield from self._parameter_follows(at + len(found), is_closed=True))
        return found is not None

    def _parameter_follows(self, at: int, *, is_closed: bool) -> Routine[bool]:
        """Return whether the rest of a parameter's opening tag comes `at` characters ahead.

        If the value before it `is_closed`, the function need not have the parameter, unless its name is an attribute of
        a tag that other languages have, too.
        """
        rest = yield from self._parser.span_ahead(_IN_TAG, _LONGEST_TAG, at)
        character = yield from self._parser.peek(at + len(rest))
        if not character:
            return is_closed
        tag = _tag_of(rest) if character == ">" else None
        assert self._parameters is not None
        if tag is None:
            return False
        is_own = not tag.is_attribute or bool(self._tags.prefix)
        if is_closed:
            return is_own or self._parameters.may_follow(tag.name)
        return is_own and self._parameters.may_follow(tag.name)


def read_tagged(parser: CallParser) -> Routine[None]:
    """Read calls as long as they come. Raises Malformed for one that breaks off."""
    while opener := (yield from parser.accept(*OPENERS)):
        yield from TaggedCall(parser, OPENERS[opener], is_bare=False).read()
