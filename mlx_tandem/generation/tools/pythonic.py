"""Calls in Python's notation: [name(key=value, ...), ...]. Llama 3.2, Llama 4 and LFM2 write them."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.sections import SectionParser


class PythonicParser(SectionParser):
    """A parser of lists of calls. Without an opener, an answer may begin with such a list of offered functions."""

    openers = Markers("<|python_start|>", "<|python_tag|>")
    closers = ("<|python_end|>",)
    starts = "[{"


class LfmParser(SectionParser):
    """A parser of LFM2's calls, which are between markers."""

    openers = Markers("<|tool_call_start|>")
    closers = ("<|tool_call_end|>",)
