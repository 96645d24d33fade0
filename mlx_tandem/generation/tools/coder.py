"""Calls with tagged parameters: those of Qwen 3 Coder, Seed, MiniMax and DeepSeek 3.2."""

from __future__ import annotations

from mlx_tandem.generation.scanner import Markers
from mlx_tandem.generation.tools.sections import SectionParser


class QwenCoderParser(SectionParser):
    """A parser of <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

    A line break at each end of a value belongs to the tags.
    """

    openers = Markers("<tool_call>", "<function")
    closers = ("</tool_call>",)


class SeedParser(SectionParser):
    """A parser of Seed's calls, which differ from those of Qwen 3 Coder in the outer tag."""

    openers = Markers("<seed:tool_call>", "<function")
    closers = ("</seed:tool_call>",)


class MiniMaxParser(SectionParser):
    """A parser of <minimax:tool_call><invoke name="NAME"><parameter name="KEY">value</parameter></invoke>."""

    openers = Markers("<minimax:tool_call>", "<invoke")
    closers = ("</minimax:tool_call>",)


class DeepSeek32Parser(SectionParser):
    """A parser of the calls of DeepSeek 3.2, whose tags say whether a value is a text."""

    openers = Markers("<｜DSML｜function_calls>", "<｜DSML｜invoke")
    closers = ("</｜DSML｜function_calls>",)
    extra_markers = ("｜DSML｜",)
