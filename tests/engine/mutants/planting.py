"""What all planted bugs have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]
"""A function that changes something for the time of a test."""


def attribute(target: Any, name: str, value: Any) -> Plant:
    """Return the plant that gives an object another value of this attribute."""
    return lambda patch: patch.setattr(target, name, value)
