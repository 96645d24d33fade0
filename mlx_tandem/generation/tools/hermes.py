"""Calls of Hermes, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser
from mlx_tandem.generation.tools.json_calls import read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """A parser of calls that are JSON objects between tags."""

    openers = Markers(OPEN)
    form = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")

    def calls(self, opener: str) -> Routine[None]:
        """Read one call."""
        yield from self.gap()
        yield from read_call(self)
        yield from self.passed(CLOSE)
