"""Calls to the engine that have one answer each, and the errors that its answers stand for."""

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
    """The open calls of one client, by their number. Used on the client's event loop."""

    def __init__(self) -> None:
        self._open: dict[int, asyncio.Future[Any]] = {}

    @contextlib.contextmanager
    def open(self, call: int) -> Iterator[asyncio.Future[Any]]:
        """Yield a future of the answer to a call, which raises the engine's error. The call is forgotten after the
        block.
        """
        future = self._open[call] = asyncio.get_running_loop().create_future()
        try:
            yield future
        finally:
            del self._open[call]

    def settle(self, answer: Answer) -> None:
        """Resolve the call that `answer` belongs to. Answers to calls that nobody waits for are dropped."""
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
        """Let all open calls raise `error`."""
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
    """Return the exception for an error that the engine reported.

    Its class follows from `code`, or from `retryable` where the code is unknown.
    """
    kind = _CLASSES.get(code) or (EngineError if retryable else InvalidRequest)
    return kind(message, param=param, code=code)
