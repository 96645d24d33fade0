"""Runs the engine's loop in this process with a script instead of the front."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.config import EngineConfig
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import EngineError
from mlx_tandem.types import AdapterInfo, EngineInfo


@dataclass(frozen=True)
class Work:
    """Messages for the engine. With `most`, at most so many are under way at once."""

    messages: Sequence[m.Submit | m.LoadAdapter]
    most: int | None = None  # None: all are handed in at once


@dataclass
class Answers:
    """The results of some work: the tokens of its requests, which are its rows in order, and the adapters it loaded."""

    timeline: Timeline
    adapters: dict[int, AdapterInfo] = field(default_factory=dict)  # by number of the call


Script = Generator[Work, Answers | None, None]
"""Generator that yields work for the engine and is sent its answers when all have come; in between it has the device
to itself."""


def run_script(start: Callable[[EngineInfo], Script], config: EngineConfig) -> None:
    """Run an engine in this process until the script of `start` has ended.

    `start` is called when the engine is ready. Objects that exist by then are not collected as garbage, as in an
    engine's own process. Raises TandemError if the model cannot be served.
    """
    from mlx_tandem.engine_main import serve

    try:
        with contextlib.suppress(WireError):
            serve(ScriptChannel(start), config, False)
    finally:
        gc.unfreeze()


class ScriptChannel(EngineChannel):
    """The engine's channel with a script at the other end, on the same thread.

    `start` is called when the engine is ready. When the script ends, the channel is closed (WireError).
    """

    def __init__(self, start: Callable[[EngineInfo], Script]):
        self._start = start
        self._script: Script | None = None
        self._answers: Answers | None = None
        self._rows: dict[int, int] = {}
        self._ahead: deque[m.Submit | m.LoadAdapter] = deque()
        self._most = 0
        self._open = 0

    def receive(self, wait: float) -> list[m.Inbound]:
        """Return messages for the engine; let the script go on when all its work is answered."""
        if not (self._open or self._ahead):
            self._go_on()
        handed: list[m.Inbound] = []
        while self._ahead and self._open < self._most:
            handed.append(self._ahead.popleft())
            self._open += 1
        if not handed and wait:
            time.sleep(min(wait, 1e-3))  # adapters are read and grammars compiled on other threads
        return handed

    def wake(self) -> None:
        """Do nothing: `receive` never waits for long."""

    def _go_on(self) -> None:
        assert self._script is not None
        try:
            work = self._script.send(self._answers)
        except StopIteration:
            raise WireError("the script has ended") from None
        requests = [message.request.id for message in work.messages if isinstance(message, m.Submit)]
        self._rows = {request: row for row, request in enumerate(requests)}
        self._ahead.extend(work.messages)
        self._most = len(work.messages) if work.most is None else work.most
        self._answers = Answers(Timeline(len(requests)))

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
        """Take messages of the engine."""
        for message in messages:
            match message:
                case m.Output():
                    assert self._answers is not None
                    self._answers.timeline.add([self._rows[d.request] for d in message.deltas for _ in d.tokens])
                    self._open -= sum(delta.finish is not None for delta in message.deltas)
                case m.AdapterLoaded():
                    assert self._answers is not None
                    self._answers.adapters[message.call] = message.info
                    self._open -= 1
                case m.Ready() if self._script is None:  # another one tells how adapters are computed
                    gc.collect()
                    gc.freeze()
                    self._script = self._start(message.info)
                case m.Failed() | m.CallFailed() | m.Fatal():
                    raise EngineError(message.message)

    def close(self) -> None:
        """Do nothing: there is no socket."""
        pass
