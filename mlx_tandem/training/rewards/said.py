"""The part of a completion that is scored: what follows a leading thought, without the fence around it."""

from __future__ import annotations

OPENED, CLOSED = "<think>", "</think>"
FENCE = "```"


def said(completion: str) -> str:
    """Return the completion without a leading thought; nothing while the thought is not closed.

    The mark that opens the thought may be missing, as it may have been the end of the prompt.
    """
    before, closed, after = completion.partition(CLOSED)
    begun = completion.lstrip().startswith(OPENED)
    if closed and (begun or OPENED not in before):
        return after
    return "" if begun else completion


def unfenced(text: str) -> str:
    """Return the content of a text that is one fenced block of Markdown; other texts as they are."""
    stripped = text.strip()
    first, newline, rest = stripped.partition("\n")
    if newline and first.startswith(FENCE) and FENCE not in rest[:-3] and rest.endswith(FENCE):
        return rest[: -len(FENCE)]
    return text
