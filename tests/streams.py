"""Reading streams of server-sent events."""

from __future__ import annotations

from collections.abc import Iterator


def data_of(text: str) -> list[str]:
    """Return the data of each event of a whole stream; comments are none."""
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


def until_token(lines: Iterator[str]) -> str:
    """Return the first event of OpenAI's that has a token. What comes before it is sent before the prompt is read."""
    return next(line for line in lines if line.startswith("data: ") and '"role":' not in line)
