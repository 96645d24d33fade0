"""Calls whose parameters are tagged: Qwen 3 Coder, Seed, MiniMax and DeepSeek 3.2."""

from __future__ import annotations

import re

from mlx_tandem.generation.scanner import Malformed, Markers, Routine
from mlx_tandem.generation.tools.calls import LONGEST_NAME, CallParser
from mlx_tandem.generation.tools.parameters import Parameters

_KEY = re.compile(r"[^<>\"\n]+")


class QwenCoderParser(CallParser):
    """A parser of <tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>.

    Models leave out the outer tag, and the closing tag of a parameter before the next tag. A line break at each end of
    a value belongs to the tags.
    """

    openers = Markers("<tool_call>", "<function=")
    closer = "</tool_call>"
    _ends = Markers(
        *(f"{space}{tag}" for space in ("", "\n") for tag in ("</parameter>", "<parameter=", "</function>"))
    )

    def calls(self, opener: str) -> Routine[None]:
        """Read one call."""
        if opener != "<function=":
            yield from self.gap()
            yield from self.expect("<function=")
        name = yield from self.name()
        yield from self.expect(">")
        yield from self.begin(name)
        parameters = Parameters(self, name)
        tag = ""
        try:
            while tag != "</function>":
                if tag in ("", "</parameter>"):
                    yield from self.gap()
                    tag = yield from self.choose("<parameter=", "</function>")
                if tag == "<parameter=":
                    tag = (yield from self._parameter(parameters)).lstrip("\n")
        except Malformed:
            yield from parameters.close()
            raise
        yield from parameters.close()
        self.end()
        yield from self.passed(self.closer)

    def _parameter(self, parameters: Parameters) -> Routine[str]:
        """Read a parameter behind the beginning of its tag; return the tag that ends it."""
        key = yield from self.span(_KEY, LONGEST_NAME)
        yield from self.expect(">")
        if (yield from self.peek()) == "\n":
            self.scan.skip()
        return (yield from parameters.value(key, self._ends))


class SeedParser(QwenCoderParser):
    """A parser of Seed's calls, which differ from those of Qwen 3 Coder in the outer tag."""

    openers = Markers("<seed:tool_call>")
    closer = "</seed:tool_call>"


class InvokeParser(CallParser):
    """A parser of SECTION<invoke name="NAME"><parameter name="KEY">value</parameter></invoke>/SECTION."""

    openers = Markers("<minimax:tool_call>")
    closer = "</minimax:tool_call>"
    tag = ""
    """What every inner tag has before its name."""

    def calls(self, opener: str) -> Routine[None]:
        """Read the calls of one section."""
        invoke, parameter = f"<{self.tag}invoke name=", f"<{self.tag}parameter name="
        end, value_end = f"</{self.tag}invoke>", f"</{self.tag}parameter>"
        ends = Markers(value_end, f"\n{value_end}")
        while True:
            yield from self.gap()
            if (yield from self.choose(invoke, self.closer)) == self.closer:
                self.end()
                return
            name = yield from self.quoted()
            yield from self.expect(">")
            yield from self.begin(name)
            parameters = Parameters(self, name)
            try:
                while True:
                    yield from self.gap()
                    if (yield from self.choose(parameter, end)) == end:
                        break
                    key = yield from self.quoted()
                    is_text = yield from self._is_text()
                    if (yield from self.peek()) == "\n":
                        self.scan.skip()
                    yield from parameters.value(key, ends, is_text)
            except Malformed:
                yield from parameters.close()
                raise
            yield from parameters.close()
            self.end()

    def _is_text(self) -> Routine[bool | None]:
        """Read the end of a parameter's tag; return what it says of the type, None for nothing."""
        yield from self.expect(">")
        return None


class DeepSeek32Parser(InvokeParser):
    """A parser of the calls of DeepSeek 3.2, whose tags say whether a value is a text."""

    openers = Markers("<｜DSML｜function_calls>")
    closer = "</｜DSML｜function_calls>"
    others = ("｜DSML｜",)
    tag = "｜DSML｜"

    def _is_text(self) -> Routine[bool | None]:
        """Read the end of a parameter's tag; return what it says of the type."""
        yield from self.expect(' string="')
        said = yield from self.choose("true", "false")
        yield from self.expect('">')
        return said == "true"
