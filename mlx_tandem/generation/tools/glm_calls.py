"""Reading the parameters of GLM's calls: pairs of <arg_key>KEY</arg_key> and <arg_value>value</arg_value>."""

from __future__ import annotations

import re

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import LONGEST_NAME, CallParser
from mlx_tandem.generation.tools.parameters import Parameters

KEY = "<arg_key>"
_KEY_END, _VALUE, _VALUE_END = "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"[^<>\n]+")


def read_keyed(parser: CallParser, name: str) -> Routine[None]:
    """Read the parameters of a call of `name`, whose name was read. Raises Malformed where they break off."""
    yield from parser.begin(name)
    parameters = Parameters(parser, name)
    closers = Markers(_VALUE_END, KEY, *parser.closers)

    def ends(closer: str) -> Routine[bool]:
        """Return whether a tag that was read ends the value before it."""
        if closer == _VALUE_END:
            return (yield from parser.ahead((KEY, *parser.closers, *parser.openers.texts)))[0] is not None
        if closer in parser.closers:
            return (yield from parser.ahead(parser.openers.texts))[0] is not None
        key = yield from parser.span_ahead(_NAME, LONGEST_NAME)
        if not parameters.may_follow(key.strip()):
            return False
        end, at = yield from parser.ahead((_KEY_END,), len(key))
        return end == _KEY_END and (yield from parser.ahead((_VALUE,), at + len(end)))[0] == _VALUE

    closer = _VALUE_END
    try:
        while closer == KEY or (closer == _VALUE_END and (yield from parser.accept(KEY))):
            key = (yield from parser.span(_NAME, LONGEST_NAME)).strip()
            yield from parser.expect(_KEY_END)
            yield from parser.gap()
            yield from parser.expect(_VALUE)
            closer = yield from parameters.value(key, closers, ends)
    except Malformed:
        yield from parameters.close()
        raise
    yield from parameters.close()
    parser.checkpoint()
