"""Calls of Llama 3 as JSON: an answer that is {"name": ..., "parameters": {...}}, several of them divided by `;`."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers, Routine
from mlx_tandem.generation.tools.calls import CallForm
from mlx_tandem.generation.tools.sections import SectionParser


class LlamaJsonParser(SectionParser):
    """A parser of answers that begin with a call of an offered function. Some models write <|python_tag|> before."""

    openers = Markers("<|python_tag|>", "<function", '{"name"')
    inline = ('{"name"',)
    starts = "{["
    form = CallForm('{"name": "', '", "parameters": ', "}", "; ")

    def calls(self, opener: str) -> Routine[None]:
        """Read one or more calls. The opener also begins code, so that only calls of offered functions count."""
        if opener == "<|python_tag|>":
            yield from self.bare()
        else:
            yield from super().calls(opener)
