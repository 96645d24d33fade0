"""Calls of Llama 3 as JSON: an answer that is {"name": ..., "parameters": {...}}, several of them divided by `;`."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm, CallParser
from mlx_tandem.generation.tools.json_calls import read_call


class LlamaJsonParser(CallParser):
    """A parser of answers that begin with a call of an offered function. Some models write <|python_tag|> before."""

    openers = Markers("<|python_tag|>")
    starts = "{"
    form = CallForm('{"name": "', '", "parameters": ', "}", "; ")

    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls."""
        while True:
            yield from self.gap()
            yield from read_call(self, offered_only=True)
            self.end()
            if not (yield from self.passed(";")):
                return
