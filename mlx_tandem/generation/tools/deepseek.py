"""Calls of DeepSeek 3 and R1, whose arguments are in a block of code, and of DeepSeek 3.1."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _NAME, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekParser(CallParser):
    """A parser of sections of calls: TYPE sep NAME and a block of JSON, or NAME sep JSON."""

    openers = Markers(_OPEN)
    others = (_CLOSE, _BEGIN, _NAME, _END)

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section."""
        while True:
            yield from self.gap()
            if (yield from self.choose(_BEGIN, _CLOSE)) == _CLOSE:
                self.end()
                return
            name = yield from self.name()
            yield from self.expect(_NAME)
            in_block = (yield from self.gap()) != "{"
            if in_block:
                name = yield from self.name()
                yield from self.gap()
                yield from self.expect("```json")
                if (yield from self.gap()) != "{":
                    raise Malformed
            yield from self.begin(name)
            yield from self.json_arguments()
            yield from self.gap()
            if in_block:
                yield from self.expect("```")
                yield from self.gap()
            yield from self.expect(_END)
            self.end()


class DeepSeek31Parser(DeepSeekParser):
    """The same parser for models that write NAME sep JSON."""

    form = CallForm(f"{_OPEN}{_BEGIN}", _NAME, f"{_END}{_CLOSE}")
