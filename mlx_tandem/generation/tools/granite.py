"""Calls of Granite 3: <|tool_call|> or <tool_call>, and a list of JSON objects. Granite 4 writes those of Hermes."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.sections import SectionParser


class GraniteParser(SectionParser):
    """A parser of lists of calls, and of single calls."""

    openers = Markers("<|tool_call|>", "<tool_call>")
    closers = ("</tool_call>",)
    starts = "{["
    form = CallForm('<|tool_call|>[{"name": "', '", "arguments": ', "}]")
