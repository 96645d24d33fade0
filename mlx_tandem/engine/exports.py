"""Exports of trainers: adapter versions and checkpoints, which other threads prepare."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.engine import messages as m
from mlx_tandem.engine.adapters import Adapters
from mlx_tandem.errors import EngineError, InvalidRequest, TandemError

log = logging.getLogger(__name__)

ExportMessage = m.PublishTrainer | m.SaveTrainer


class _Export(NamedTuple):
    message: ExportMessage
    future: Future[Any]


class Exports:
    """The versions and checkpoints that are being prepared.

    Each kind of work has a thread of its own, so that no version waits for a checkpoint to be written.
    """

    def __init__(self, adapters: Adapters, most_rank: int):
        """Create an empty list of exports. Versions of a rank up to `most_rank` are published to `adapters`."""
        self._adapters = adapters
        self._most_rank = most_rank
        self._under_way: list[_Export] = []
        self._threads: dict[type[ExportMessage], ThreadPoolExecutor] = {}

    def __len__(self) -> int:
        """Return how many exports are not answered yet."""
        return len(self._under_way)

    def begin(self, message: ExportMessage, work: Callable[[], Any]) -> None:
        """Run `work` on another thread; `poll` returns the answer to `message` once it is done."""
        thread = self._threads.get(type(message))
        if thread is None:
            thread = self._threads[type(message)] = ThreadPoolExecutor(1, "tandem-training")
        self._under_way.append(_Export(message, thread.submit(work)))

    def poll(self) -> list[m.Outbound]:
        """Return the answers to finished exports, and let requests use the published versions."""
        if not any(export.future.done() for export in self._under_way):
            return []
        done = [export for export in self._under_way if export.future.done()]
        self._under_way = [export for export in self._under_way if export not in done]
        return [self._answer(*export) for export in done]

    def close(self) -> None:
        """Wait until everything that was begun has been written."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)

    def _answer(self, message: ExportMessage, future: Future[Any]) -> m.Outbound:
        try:
            result = future.result()
            if isinstance(message, m.PublishTrainer):
                self._publish(result)
                return m.AdapterLoaded(message.call, result.info)
            return m.CallDone(message.call)
        except TandemError as e:
            return call_failed(message.call, e)
        except Exception as e:
            what = "published" if isinstance(message, m.PublishTrainer) else "saved"
            log.error("a trainer could not be %s: %r", what, e)
            why = (e.strerror if isinstance(e, OSError) else None) or type(e).__name__
            return call_failed(message.call, EngineError(f"the trainer could not be {what}: {why}"))

    def _publish(self, weights: AdapterWeights) -> None:
        if weights.info.rank > self._most_rank:
            raise InvalidRequest(
                f"an adapter of rank {weights.info.rank} cannot be served: the limit is {self._most_rank}", param="rank"
            )
        self._adapters.publish(weights)


def call_failed(call: int, error: TandemError) -> m.CallFailed:
    """Return the answer to a call that ended with `error`."""
    return m.CallFailed(call, error.code or "invalid_value", error.message, error.param)
