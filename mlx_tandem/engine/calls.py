"""Questions to the engine that have one answer each, and which error it means when it says that one has failed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from mlx_tandem.engine.messages import AdapterLoaded, CallDone, CallFailed, PassDone, Stepped, TrainerOpened
from mlx_tandem.errors import (
    Conflict,
    EngineDied,
    EngineError,
    EngineUnavailable,
    InvalidRequest,
    ModelError,
    NotFound,
    TandemError,
    TooLarge,
)

Answer = AdapterLoaded | TrainerOpened | PassDone | Stepped | CallDone | CallFailed


class Calls:
    """Those that are open, by their number."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Any]] = {}

    @contextlib.contextmanager
    def open(self, call: int) -> Iterator[asyncio.Future[Any]]:
        """What will have the answer, or raise what the engine has raised. Nobody waits any more when the block ends."""
        future = self._open[call] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._open[call]

    def settle(self, answer: Answer) -> None:
        """What the engine says to one of them."""
        future = self._open.get(answer.call)
        if future is None or future.done():
            return
        match answer:
            case CallFailed():
                future.set_exception(error_of(answer.code, answer.message, answer.param, retryable=False))
            case AdapterLoaded() | TrainerOpened():
                future.set_result(answer.info)
            case PassDone():
                future.set_result(answer.results)
            case Stepped():
                future.set_result(answer.done)
            case CallDone():
                future.set_result(None)

    def fail(self, error: TandemError) -> None:
        """None of them will be answered."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)


_CLASSES: Mapping[str, type[TandemError]] = {
    str(c.code): c
    for c in (InvalidRequest, NotFound, Conflict, TooLarge, ModelError, EngineError, EngineDied, EngineUnavailable)
} | {
    "invalid_adapter": ModelError,
    "adapter_not_found": NotFound,
    "adapter_changed": Conflict,
    "model_not_found": NotFound,
    "trainer_not_found": NotFound,
}


def error_of(code: str, message: str, param: str | None, retryable: bool) -> TandemError:
    """The error that the engine meant: by its code, else by who has to act."""
    kind = _CLASSES.get(code) or (EngineError if retryable else InvalidRequest)
    return kind(message, param=param, code=code)
