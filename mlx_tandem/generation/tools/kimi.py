"""Calls of Kimi K2, which have ids of the form functions.NAME:NUMBER."""

from __future__ import annotations

import re

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser

OPEN, CLOSE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiParser(CallParser):
    """A parser of sections of calls. The model's own ids are kept, since its chat template prints them again."""

    openers = Markers(OPEN)
    others = (CLOSE, _BEGIN, _ARGUMENTS, _END)
    form = CallForm(f"{OPEN}{_BEGIN}functions.", f":0{_ARGUMENTS}", f"{_END}{CLOSE}")

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section."""
        while True:
            yield from self.gap()
            if (yield from self.choose(_BEGIN, CLOSE)) == CLOSE:
                self.end()
                return
            yield from self.gap()
            id = yield from self.name()
            yield from self.gap()
            yield from self.expect(_ARGUMENTS)
            if (yield from self.gap()) != "{":
                raise Malformed
            match = _ID.fullmatch(id)
            yield from self.begin(match.group(1) if match else id, id)
            yield from self.json_arguments()
            yield from self.gap()
            yield from self.expect(_END)
            self.end()
