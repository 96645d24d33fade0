"""Reading of adapter folders on a few threads outside the engine's loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mlx_tandem.adapters.formats import AdapterWeights
from mlx_tandem.errors import ModelError, TandemError
from mlx_tandem.types import AdapterSource

log = logging.getLogger(__name__)

THREADS = 2
"""Most threads that read at once."""

Key = TypeVar("Key")


class Loader(Generic[Key]):
    """A reader of adapter folders. `start` queues a folder, and `results` returns what was read, by the given key."""

    def __init__(self, read: Callable[[AdapterSource], AdapterWeights]):
        self._read = read
        self._jobs: SimpleQueue[tuple[Key, AdapterSource] | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[Key, AdapterWeights | TandemError]] = SimpleQueue()
        self._threads = 0
        self.pending = 0  # folders started whose results were not taken yet

    def start(self, key: Key, source: AdapterSource) -> None:
        """Queue a folder to be read, and return at once."""
        self.pending += 1
        self._jobs.put((key, source))
        if self._threads < min(THREADS, self.pending):
            self._threads += 1
            threading.Thread(target=self._work, name="tandem-loader", daemon=True).start()

    def results(self) -> Iterator[tuple[Key, AdapterWeights | TandemError]]:
        """Yield what was read since the last call, in the order in which the reads ended, an error
        in place of weights.
        """
        while self.pending:
            try:
                result = self._done.get_nowait()
            except Empty:
                return
            self.pending -= 1
            yield result

    def close(self) -> None:
        """Let the threads end once they have read everything that was started."""
        for _ in range(self._threads):
            self._jobs.put(None)
        self._threads = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            key, source = job
            result: AdapterWeights | TandemError
            try:
                result = self._read(source)
            except TandemError as e:
                result = e
            except Exception as e:
                log.exception("an adapter could not be read")
                result = ModelError(f"the adapter folder cannot be read: {type(e).__name__}")
            self._done.put((key, result))
