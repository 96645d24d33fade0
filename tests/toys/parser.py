"""A parser of a made-up format, in one file: <think>…</think> is reasoning, and [name:arguments] calls a tool."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_tandem.generation.events import ReasoningDelta, Said, TextDelta, ToolCallArguments, ToolCallStart

MARKERS = {"text": ("<think>", "["), "reasoning": ("</think>",), "name": (":",), "arguments": ("]",)}
"""What ends each state."""
NEXT = {"<think>": "reasoning", "</think>": "text", "[": "name", ":": "arguments", "]": "text"}


class ToyParser:
    """Reads one choice. At most a marker less one character is held back, and the name of a call."""

    def __init__(self, choice: int):
        self._choice = choice
        self._state = "text"
        self._rest = ""
        self._name = ""
        self._call = -1

    def push(self, text: str) -> Iterator[Said]:
        self._rest += text
        while True:
            found = [(at, m) for m in MARKERS[self._state] if (at := self._rest.find(m)) >= 0]
            if not found:
                break
            at, marker = min(found)
            yield from self._say(self._rest[:at])
            self._rest = self._rest[at + len(marker) :]
            if marker == ":":
                self._call += 1
                yield ToolCallStart(self._choice, self._call, f"call-{self._choice}-{self._call}", self._name)
                self._name = ""
            self._state = NEXT[marker]
        held = max(n for m in MARKERS[self._state] for n in range(len(m)) if self._rest.endswith(m[:n]) or n == 0)
        cut = len(self._rest) - held
        yield from self._say(self._rest[:cut])
        self._rest = self._rest[cut:]

    def flush(self, *, cut: bool = False) -> Iterator[Said]:
        if self._state == "name":  # no call has begun
            self._state, self._rest = "text", f"[{self._name}{self._rest}"
        yield from self._say(self._rest)
        self._rest = ""

    def _say(self, text: str) -> Iterator[Said]:
        if not text:
            return
        if self._state == "text":
            yield TextDelta(self._choice, text)
        elif self._state == "reasoning":
            yield ReasoningDelta(self._choice, text)
        elif self._state == "name":
            self._name += text
        else:
            yield ToolCallArguments(self._choice, self._call, text)
