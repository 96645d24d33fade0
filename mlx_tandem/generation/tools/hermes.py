"""Calls of Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.sections import SectionParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(SectionParser):
    """A parser of calls that are JSON objects between tags."""

    openers = Markers(OPEN, "<function")
    closers = (CLOSE,)
    starts = "{"
    form = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
