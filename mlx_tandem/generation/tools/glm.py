"""Calls of GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>."""

from __future__ import annotations

import re

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import LONGEST_NAME, CallParser
from mlx_tandem.generation.tools.parameters import Parameters

_KEY = re.compile(r"[^<>\n]+")
_VALUE_END = Markers("</arg_value>")


class GlmParser(CallParser):
    """A parser of calls whose parameters are pairs of a key and a value, each with a tag of its own."""

    openers = Markers("<tool_call>")
    others = ("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def calls(self, opener: str) -> Routine[None]:
        """Read one call."""
        yield from self.gap()
        name = yield from self.name()
        yield from self.gap()
        tag = yield from self.choose("<arg_key>", "</tool_call>")
        yield from self.begin(name)
        parameters = Parameters(self, name, guesses=True)
        try:
            while tag != "</tool_call>":
                key = yield from self.span(_KEY, LONGEST_NAME)
                yield from self.expect("</arg_key>")
                yield from self.gap()
                yield from self.expect("<arg_value>")
                yield from parameters.value(key, _VALUE_END)
                yield from self.gap()
                tag = yield from self.choose("<arg_key>", "</tool_call>")
        except Malformed:
            yield from parameters.close()
            raise
        yield from parameters.close()
        self.end()
