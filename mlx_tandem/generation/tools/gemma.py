"""Calls of FunctionGemma and Gemma 4: call:NAME{key:value,...}, where texts are between marks of their own."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.sections import SectionParser


class FunctionGemmaParser(SectionParser):
    """A parser of FunctionGemma's calls. Its models leave out the marks of short texts."""

    openers = Markers("<start_function_call>")
    closers = ("<end_function_call>",)
    mark = "<escape>"
    extra_markers = ("<escape>",)


class Gemma4Parser(SectionParser):
    """A parser of Gemma 4's calls."""

    openers = Markers("<|tool_call>")
    closers = ("<tool_call|>",)
    mark = '<|"|>'
    extra_markers = ('<|"|>',)
