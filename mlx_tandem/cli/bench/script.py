"""The engine's loop in this process, with a script in the place of the front."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from mlx_tandem.cli.bench.timeline import Timeline
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.wire import EngineChannel, WireError
from mlx_tandem.errors import EngineError
from mlx_tandem.types import AdapterInfo, EngineInfo


@dataclass
class Answers:
    """What came of some messages: the tokens of their requests, which are its rows in order, and their adapters."""

    timeline: Timeline
    adapters: dict[int, AdapterInfo] = field(default_factory=dict)  # by call


Script = Generator[Sequence[m.Submit | m.LoadAdapter], Answers | None, None]
"""Yields messages for the engine, and is sent their answers once all have come. In between it has the device to
itself."""


class ScriptChannel(EngineChannel):
    """The engine's channel with a script at the other end, on the same thread. `start` is called when the engine is
    ready; when the script ends, the channel is closed (WireError)."""

    def __init__(self, start: Callable[[EngineInfo], Script]):
        self._start = start
        self._script: Script | None = None
        self._answers: Answers | None = None
        self._rows: dict[int, int] = {}
        self._open = 0

    def receive(self, wait: float) -> list[m.Inbound]:
        if self._open:
            return []
        assert self._script is not None
        try:
            messages = self._script.send(self._answers)
        except StopIteration:
            raise WireError("the script has ended") from None
        requests = [message.request.id for message in messages if isinstance(message, m.Submit)]
        self._rows = {request: row for row, request in enumerate(requests)}
        self._open = len(messages)
        self._answers = Answers(Timeline(len(requests)))
        return list(messages)

    def send(self, messages: Sequence[m.Inbound | m.Outbound]) -> None:
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
                case m.Ready():
                    self._script = self._start(message.info)
                case m.Failed() | m.CallFailed() | m.Fatal():
                    raise EngineError(message.message)

    def close(self) -> None:
        pass
