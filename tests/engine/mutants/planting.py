"""The type of planted bugs, and functions that make the common kinds of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlx_tandem.engine.sequence import Sequence

Plant = Callable[[pytest.MonkeyPatch], None]
"""A function that changes something for the time of a test."""


def attribute(target: Any, name: str, value: Any) -> Plant:
    """Return the plant that gives an object another value of this attribute."""
    return lambda patch: patch.setattr(target, name, value)


def preset(target: Any, method: str, name: str, value: Any) -> Plant:
    """Return the plant by which a method of `target` gives its sequence another value of this attribute first."""

    def changed(self: Any, s: Sequence) -> Any:
        setattr(s, name, value)
        return original(self, s)

    original = getattr(target, method)
    return attribute(target, method, changed)


def kept(target: Any, method: str, name: str) -> Plant:
    """Return the plant by which a method of `target` leaves its sequence the value that this attribute had."""

    def changed(self: Any, s: Sequence) -> None:
        before = getattr(s, name)
        original(self, s)
        setattr(s, name, before)

    original = getattr(target, method)
    return attribute(target, method, changed)
