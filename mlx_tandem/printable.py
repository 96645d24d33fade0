"""Makes text from files and clients safe to show; all such text passes through here on its way into messages."""

from __future__ import annotations

import re

MOST_SHOWN = 2000
"""Most characters of an error's message, of a log line's text and of a line on a terminal."""

_UNSAFE = re.compile(
    "["
    "\x00-\x1f\x7f-\x9f"  # control characters, which begin lines and steer terminals
    "\u2028\u2029"  # separators of lines and paragraphs
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reverse the order in which text is shown
    "\ud800-\udfff"  # halves of surrogate pairs, which no encoding can carry
    "]"
)


def printable(text: str, most: int = MOST_SHOWN) -> str:
    r"""Return `text` as one line of at most `most` characters that every encoding, log and terminal can carry.

    Control characters, separators of lines, marks of direction and lone surrogates become escapes such as \x1b and
    \ud800. An ellipsis stands for what is cut off. A text that this function returned is returned unchanged.
    """
    if len(text) <= most and text.isprintable():
        return text
    text = _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text[: most + 1])
    return text if len(text) <= most else text[: most - 1] + "…"
