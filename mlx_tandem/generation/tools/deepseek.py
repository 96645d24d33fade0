"""Calls of DeepSeek 3 and R1, whose arguments are in a block of code, and of DeepSeek 3.1."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import NAME_CHARACTERS, CallForm, CallParser

_OPEN, _CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_BEGIN, _NAME, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeekParser(CallParser):
    """A parser of sections of calls: TYPE sep NAME and a block of JSON, or NAME sep JSON."""

    openers = Markers(_OPEN, _BEGIN)
    closers = (_CLOSE,)
    extra_markers = (_NAME, _END, "```")

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section, or one call without a section."""
        before = self.call_count
        while opener == _BEGIN or (yield from self.accept(_BEGIN)):
            opener = ""
            yield from self.gap()
            name = yield from self.name()
            if not (yield from self.accept(_NAME)):
                raise Malformed
            fence = yield from self.accept("```json", "```")
            if not fence and name == "function" and NAME_CHARACTERS.match((yield from self.gap())):
                name = yield from self.name()
                fence = yield from self.accept("```json", "```")
            yield from self.object_or_nothing(name)
            if fence:
                yield from self.accept("```")
            yield from self.accept(_END)
            self.checkpoint()
        yield from self.end_section(before)


class DeepSeek31Parser(DeepSeekParser):
    """The same parser for models that write NAME sep JSON."""

    form = CallForm(f"{_OPEN}{_BEGIN}", _NAME, f"{_END}{_CLOSE}")
