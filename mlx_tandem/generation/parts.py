"""The type of a part of a prompt's text."""

from __future__ import annotations

Part = tuple[str, bool]
"""A piece of a prompt's text, and whether it is plain. A plain piece never encodes to a special token."""
