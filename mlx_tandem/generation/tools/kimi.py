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

    openers = Markers(OPEN, _BEGIN)
    closers = (CLOSE,)
    extra_markers = (_ARGUMENTS, _END)
    form = CallForm(f"{OPEN}{_BEGIN}functions.", f":0{_ARGUMENTS}", f"{_END}{CLOSE}")

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section, or one call without a section."""
        before = self.call_count
        while opener == _BEGIN or (yield from self.accept(_BEGIN)):
            opener = ""
            yield from self.gap()
            id = yield from self.name()
            match = _ID.fullmatch(id)
            name = match.group(1) if match else id
            if (yield from self.accept(_ARGUMENTS)):
                yield from self.object_or_nothing(name, id if ":" in id else "")
            elif name in self.tools.functions:
                yield from self.object(name, id if ":" in id else "", self.values())
            else:
                raise Malformed
            yield from self.accept(_END)
            self.checkpoint()
        yield from self.end_section(before)
