"""Engine loops for tests, closed at their end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_tandem.engine import messages as m
from tests.engine.front import Front
from tests.engine.slices import Slices, open_trainer


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
def trainers() -> Slices:
    return Slices()


@pytest.fixture
def learning_front(make_front: Callable[..., Front], trainers: Slices) -> Front:
    """Its trainer "p" is open."""
    front = make_front(trainers=trainers)
    front.send(open_trainer(1))
    front.turn(2)
    assert [x.call for x in front.got(m.TrainerOpened)] == [1]
    trainers.done.clear()
    return front


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now
