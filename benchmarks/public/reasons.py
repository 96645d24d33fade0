"""The accepted differences between our parsers and the tests of other projects, with their reasons."""

from __future__ import annotations

REASONS: dict[str, str] = {}
"""The reason of each accepted difference by the test's id, or by the beginning of the ids of several."""
