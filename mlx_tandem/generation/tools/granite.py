"""Calls of Granite 3: <|tool_call|> or <tool_call>, and a list of JSON objects. Granite 4 writes those of Hermes."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser
from mlx_tandem.generation.tools.json_calls import read_call, read_calls


class GraniteParser(CallParser):
    """A parser of lists of calls, and of single calls."""

    openers = Markers("<|tool_call|>", "<tool_call>")
    form = CallForm('<|tool_call|>[{"name": "', '", "arguments": ', "}]")

    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls."""
        if (yield from self.gap()) == "[":
            yield from read_calls(self)
        else:
            yield from read_call(self)
        yield from self.passed("</tool_call>")
