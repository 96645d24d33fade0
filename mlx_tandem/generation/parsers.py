"""The interface of parsers, which find reasoning and tool calls in the text of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mlx_tandem.generation.events import Said


class Parser(Protocol):
    """A reader of one choice's text, which turns the pieces into events in order and without details.

    A parser holds back text that may still become a marker. It also holds back, up to a bound, calls whose name is not
    known yet, and calls inside of thoughts. It turns malformed calls and thoughts into plain text and raises nothing.
    """

    def push(self, text: str) -> Iterable[Said]:
        """Return the events that the next piece of text completes."""
        ...

    def flush(self, *, cut: bool = False) -> Iterable[Said]:
        """Return the events for the text that was held back. No more text follows.

        `cut` says that something else than the model has ended the text, such as a limit of tokens. The arguments of a
        call that has not ended then stay as they are; otherwise they are completed.
        """
        ...


MakeParser = Callable[[int], Parser]
"""A function that returns the parser for the choice with the given number."""
