"""Calls of GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.sections import SectionParser


class GlmParser(SectionParser):
    """A parser of calls whose parameters are pairs of a key and a value, each with a tag of its own."""

    openers = Markers("<tool_call>", "<function")
    closers = ("</tool_call>",)
    extra_markers = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
