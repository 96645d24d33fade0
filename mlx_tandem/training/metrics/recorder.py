"""The recorder of one training: hands metrics and samples to its writers on a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import Full, Queue
from typing import Any

from mlx_tandem.training.metrics.jsonl import JsonLines
from mlx_tandem.training.metrics.tensorboard import TensorBoard
from mlx_tandem.training.metrics.trackio import Trackio
from mlx_tandem.training.metrics.wandb import WeightsAndBiases
from mlx_tandem.training.metrics.writer import Passing, Sample, Writer

log = logging.getLogger(__name__)

MOST_WAITING = 4096
"""Most entries that wait for slow writers. Those that come when there are more are lost."""

CLOSE_SECONDS = 30.0
"""Time that writers have to write what is left at the end."""

Entry = Callable[[Writer], None]
Opener = Callable[[], Writer]


class Recorder:
    """Gives entries to writers and never waits for them, so that nothing that they do slows or stops training.

    A writer that fails is reported once and gets no further entries; the others go on. One whose failure may pass is
    reported once as well and gets later entries; when it takes them again, that is reported, too.
    """

    def __init__(self, openers: Mapping[str, Opener], warn: Callable[[str], None] = log.warning):
        """Open the writers, by their names in warnings, on the recorder's thread."""
        self._openers = dict(openers)
        self._warn = warn
        self._entries: Queue[Entry | None] = Queue(MOST_WAITING)
        self._lost = 0
        self._thread: threading.Thread | None = None
        if self._openers:
            self._thread = threading.Thread(target=self._run, name="tandem-metrics", daemon=True)
            self._thread.start()

    def scalars(self, kind: str, step: int, values: Mapping[str, float | None]) -> None:
        """Record the finite ones of these numbers."""
        known = {name: x for name, x in values.items() if x is not None and math.isfinite(x)}
        self._put(lambda writer: writer.scalars(kind, step, known))

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Record samples, whose texts are shortened."""
        short = [sample.shortened() for sample in samples]
        if short:
            self._put(lambda writer: writer.samples(step, short))

    def close(self) -> None:
        """Write what is left, for at most CLOSE_SECONDS. A second call does nothing."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with contextlib.suppress(Full):
            self._entries.put(None, timeout=CLOSE_SECONDS)
        thread.join(CLOSE_SECONDS)
        if thread.is_alive():
            self._warn("metrics: the writers did not end in time; what was left is lost")
        if self._lost:
            self._warn(f"metrics: {self._lost} entries were lost because the writers were too slow")

    def _put(self, entry: Entry) -> None:
        if self._thread is None:
            return
        try:
            self._entries.put_nowait(entry)
        except Full:
            self._lost += 1

    def _run(self) -> None:
        writers: dict[str, Writer] = {}
        missed: dict[str, int] = {}  # entries that writers which may recover have not taken

        def guarded(name: str, work: Callable[[], Any]) -> Any:
            try:
                done = work()
            except Passing as e:
                if name not in missed:
                    self._warn(f"metrics: {name} takes no entries for now: {e}")
                missed[name] = missed.get(name, 0) + 1
                return None
            except Exception as e:
                writers.pop(name, None)
                self._warn(f"metrics: {name} failed and gets no more of them: {type(e).__name__}: {str(e)[:500]}")
                return None
            if lost := missed.pop(name, 0):
                self._warn(f"metrics: {name} takes entries again; {lost} were lost")
            return done

        for name, opener in self._openers.items():
            writer = guarded(name, opener)
            if writer is not None:
                writers[name] = writer
        while (entry := self._entries.get()) is not None:
            for name, writer in list(writers.items()):
                guarded(name, partial(entry, writer))
        for name, writer in list(writers.items()):
            guarded(name, writer.close)


def openers(
    file: Path | None, trackers: Sequence[str], folder: Path, name: str, settings: Mapping[str, Any]
) -> dict[str, Opener]:
    """Return what opens the writers of a training: the JSONL `file`, if there is one, and these trackers.

    `folder` is for the trackers' local files; `name` and `settings` are those of the run as trackers show it.
    """
    known: dict[str, Opener] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard"),
        "wandb": lambda: WeightsAndBiases(folder, name, settings),
        "trackio": lambda: Trackio(name, settings),
    }
    chosen = {tracker: known[tracker] for tracker in dict.fromkeys(trackers)}
    return chosen if file is None else {str(file): lambda: JsonLines(file), **chosen}
