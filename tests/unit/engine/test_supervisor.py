"""When an engine that has died is launched again, after how long, and when it is given up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlx_tandem.engine.client import supervisor
from mlx_tandem.engine.client.supervisor import DEATH_WINDOW, Supervisor
from mlx_tandem.engine.messages import Fatal
from mlx_tandem.errors import EngineError, ModelError, TandemError

Life = tuple[float, bool]
"""Seconds of an engine from launch to death, and whether it became ready."""


class Supervised(Supervisor):
    """Engines that live as `lives` say, on a clock of their own; afterwards it drains."""

    def __init__(self, lives: list[Life]) -> None:
        super().__init__(cast(Any, None), backoff_seconds=0.5)
        self.lives = iter(lives)
        self.now = 1000.0
        self.waits: list[float] = []
        self.states: list[str] = []

    async def _run_once(self) -> str:
        self.states.append(self.state)
        seconds, self._was_ready = next(self.lives, (0.0, False))
        if not seconds:
            self.begin_drain()
        if self._was_ready:
            self._settled.set()
        self.now += seconds
        return f"after {seconds}"

    async def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def _on_messages(self, messages: list[Any]) -> None:
        raise AssertionError

    def _fail_all(self, error: TandemError) -> None:
        raise AssertionError

    def _fail_sent(self, error: TandemError) -> None:
        raise AssertionError

    def _begin(self) -> None:
        raise AssertionError


def supervised(lives: list[Life], monkeypatch: pytest.MonkeyPatch) -> Supervised:
    async def lived() -> Supervised:
        side = Supervised(lives)
        with monkeypatch.context() as patch:
            patch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: side.now))
            patch.setattr(supervisor.asyncio, "sleep", side.sleep)
            await side._supervise()
        return side

    return asyncio.run(lived())


LONG = DEATH_WINDOW + 1.0


@pytest.mark.parametrize(
    ("lives", "waits", "dead"),
    [
        ([(1.0, False)], [0.0], False),
        ([(1.0, False)] * 2, [0.0, 0.5], False),
        ([(1.0, False)] * 9, [0.0, 0.5], True),
        ([(LONG, False)] * 9, [0.0] * 9, False),
        ([(DEATH_WINDOW / 2 - 1.0, False)] * 9, [0.0, 0.5], True),
        ([(DEATH_WINDOW / 2 + 1.0, False)] * 9, [0.0] + [0.5] * 8, False),
        ([(1.0, True)] * 9, [0.0] * 9, False),
        ([(1.0, True), (1.0, False), (1.0, False), (1.0, False)], [0.0, 0.5], True),
        ([(1.0, False), (1.0, False), (1.0, True), (1.0, False)], [0.0, 0.5, 0.0, 0.5], False),
    ],
)
def test_it_is_launched_again_after_ever_longer_waits_until_it_died_too_often(
    lives: list[Life], waits: list[float], dead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = supervised(lives, monkeypatch)
    assert (side.waits, side.restarts) == (waits, len(waits))
    assert side.state == ("dead" if dead else "draining")
    assert side._dead.is_set() == dead
    was_ready = [ready for _, ready in lives]
    assert side.states == ["restarting" if any(was_ready[:i]) else "starting" for i in range(len(waits) + 1)]
    if dead:
        assert isinstance(side.failure, EngineError) and "ended 3 times" in side.failure.message


@pytest.mark.parametrize("ready", [False, True])
def test_what_an_engine_says_of_its_end_is_final_before_the_first_one_was_ready(
    ready: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Telling(Supervised):
        async def _run_once(self) -> str:
            self._fatal = None
            why = await super()._run_once()
            self._on_news(Fatal("odd", "it is odd"))
            return why

    monkeypatch.setattr(f"{__name__}.Supervised", Telling)
    side = supervised([(1.0, ready), (1.0, False)], monkeypatch)
    assert side.waits == ([0.0, 0.5] if ready else [])
    assert side.state == ("draining" if ready else "dead")
    assert type(side._fatal) is (EngineError if ready else ModelError)
    assert side._fatal is not None and (side._fatal.code, side._fatal.message) == ("odd", "it is odd")
    assert side.failure is (None if ready else side._fatal)
