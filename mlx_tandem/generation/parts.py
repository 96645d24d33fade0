"""The type of a part of a prompt's text."""

from __future__ import annotations

Part = tuple[str, bool]
"""A piece of a prompt's text, and whether it is plain. A plain piece never encodes to a special token."""

IMAGE_MARK = "\U0010fffd"
"""The character (of Unicode's private use) that stands for an image in the text of a template that reads texts only."""
