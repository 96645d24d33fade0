"""Calls whose parameters are tagged: Qwen 3 Coder, Seed, MiniMax and DeepSeek 3.2."""

from __future__ import annotations

import re
from typing import NamedTuple

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallParser
from mlx_tandem.generation.tools.parameters import Parameters

_LONGEST_TAG = 256
_IN_TAG = re.compile(r"[^<>\n]+")
_NAMED = re.compile(r"""\s*(?:=|\s\s*name\s*=)\s*(["']?)([^"'<>\n]+?)\1\s*(/|string\s*=\s*["'](true|false)["'])?\s*""")


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

    def read(self) -> Routine[None]:
        """Read the call behind the beginning of its tag. Raises Malformed where no call begins."""
        parser, tags = self._parser, self._tags
        name, is_closed, _ = yield from self._named()
        if is_closed and (name in parser.tools.functions or not self._is_bare):
            yield from parser.begin(name)
            yield from parser.arguments("{}")
            parser.end()
            return
        following, _ = yield from parser.ahead((tags.opener, tags.call_closer, "{", *parser.closers))
        offered = name in parser.tools.functions
        if following is None or (self._is_bare and not (offered and following)) or (not following and not offered):
            raise Malformed
        if following == "{":
            yield from parser.gap()
            yield from parser.object(name, "", parser.values())
            yield from parser.passed(tags.call_closer)
            parser.end()
            return
        yield from parser.begin(name)
        self._parameters = Parameters(parser, name)
        try:
            yield from self._read_parameters(self._parameters)
        except Malformed:
            yield from self._parameters.close()
            raise
        yield from self._parameters.close()
        yield from parser.passed(tags.call_closer)
        parser.end()

    def _read_parameters(self, parameters: Parameters) -> Routine[None]:
        """Read the parameters up to the end of the call, which stays unread."""
        parser, tags = self._parser, self._tags
        closer = tags.closer
        while True:
            if closer == tags.call_closer:
                return
            if closer == tags.closer and not (yield from parser.passed(tags.opener)):
                return
            key, _, said = yield from self._named()
            is_framed = tags.framed and (yield from parser.peek()) == "\n"
            if is_framed:
                parser.scan.skip()
            closer = yield from parameters.value(key, self._closers, self._ends, said=said, is_framed=is_framed)

    def _named(self) -> Routine[tuple[str, bool, str]]:
        """Read the rest of an opening tag.

        Return the name in it, whether it closes itself, and whether it says that the value is a text: "true", "false",
        or nothing.
        """
        match = _NAMED.fullmatch((yield from self._parser.span(_IN_TAG, _LONGEST_TAG)))
        if match is None:
            raise Malformed
        yield from self._parser.expect(">")
        return match.group(2).strip(), match.group(3) == "/", match.group(4) or ""

    def _ends(self, closer: str) -> Routine[bool]:
        """Return whether a tag that was read ends the value before it."""
        parser, tags = self._parser, self._tags
        assert self._parameters is not None
        if closer == tags.closer:
            ends = (tags.opener, tags.call_closer, *self._call_ends)
            return (yield from parser.ahead(ends))[0] is not None
        if closer == tags.call_closer:
            return (yield from parser.ahead(self._call_ends))[0] is not None
        size = 0
        while (character := (yield from parser.peek(size))) not in ("", ">", "\n", "<") and size < _LONGEST_TAG:
            size += 1
        match = _NAMED.fullmatch(parser.scan.peek(0, size))
        return character == ">" and match is not None and self._parameters.may_follow(match.group(2).strip())


def read_tagged(parser: CallParser) -> Routine[None]:
    """Read calls as long as they come. Raises Malformed for one that breaks off."""
    while opener := (yield from parser.passed(*OPENERS)):
        yield from TaggedCall(parser, OPENERS[opener], is_bare=False).read()
