"""Calls of FunctionGemma and Gemma 4: call:NAME{key:value,...}, where texts are between marks of their own."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from mlx_tandem.generation.events import Said
from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.literals import LiteralParser


class FunctionGemmaParser(LiteralParser):
    """A parser of FunctionGemma's calls. Its models leave out the marks of short texts."""

    openers = Markers("<start_function_call>")
    closer = "<end_function_call>"
    mark: ClassVar[str] = "<escape>"
    others: ClassVar[tuple[str, ...]] = ("<end_function_call>", "<escape>")
    word_characters = re.compile(r"[^,{}\[\]<>:\n]+")
    bare_texts = True

    def calls(self, opener: str) -> Routine[None]:
        """Read one call."""
        yield from self.gap()
        yield from self.expect("call:")
        name = yield from self.name()
        yield from self.gap()
        yield from self.expect("{")
        yield from self.begin(name)
        yield from self.arguments("{")
        yield from self.pairs("}", ":")
        self.end()
        yield from self.passed(self.closer)

    def string(self, first: str) -> Routine[bool]:
        """Read a text between two marks."""
        if first != self.mark[0]:
            return False
        yield from self.expect(self.mark)
        yield from self.arguments('"')
        if (yield from self.upto(Markers(self.mark), self._piece)) is None:
            raise Malformed
        yield from self.arguments('"')
        return True

    def _piece(self, text: str) -> tuple[Said, ...]:
        """Return the event for a piece of a text."""
        return tuple(self.arguments(json.dumps(text, ensure_ascii=False)[1:-1]))


class Gemma4Parser(FunctionGemmaParser):
    """A parser of Gemma 4's calls."""

    openers = Markers("<|tool_call>")
    closer = "<tool_call|>"
    mark = '<|"|>'
    others = ("<tool_call|>", '<|"|>')
