"""Back ends that are not there: the answers of one device, or of a part of one, on the machine of a test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlx_tandem.model import backend


def answer_as(monkeypatch: pytest.MonkeyPatch, **groups: Any) -> None:
    """Have the package find this machine's back end with other answers of some groups (`Backend`) for the rest of the
    test."""
    there = replace(backend.current(), **groups)
    monkeypatch.setattr(backend, "current", lambda: there)
