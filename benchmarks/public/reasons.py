"""The accepted differences between our parsers and the tests of other projects, with their reasons."""

from __future__ import annotations

REASONS: dict[str, str] = {}
"""The reason of a difference by the test's id, with or without its parameters."""
