"""Engine loops for tests, closed at their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.front import Front


@pytest.fixture
def make_front() -> Iterator[Callable[..., Front]]:
    fronts: list[Front] = []

    def make(**options: Any) -> Front:
        fronts.append(Front(**options))
        return fronts[-1]

    yield make
    for front in fronts:
        front.socket.close()
        front.core._channel.close()


@pytest.fixture
def front(make_front: Callable[..., Front]) -> Front:
    return make_front()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now
