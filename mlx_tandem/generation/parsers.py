"""The seam for parsers, which find reasoning and tool calls in the text of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mlx_tandem.generation.events import Said


class Parser(Protocol):
    """Reads the text of one choice in pieces and says it as events, in order and without details.

    What may still become a marker is held back, so no more than the longest marker. A text that is no proper call or
    thought is said as text: a parser raises nothing.
    """

    def push(self, text: str) -> Iterable[Said]:
        """Return the events that the next piece of text completes."""
        ...

    def flush(self) -> Iterable[Said]:
        """Return what was held back, now that no more text comes."""
        ...


MakeParser = Callable[[int], Parser]
"""Makes the parser of the choice with this number."""
