"""The stages of an engine's start: how long each has taken, and how long the rest will take by the last start.

The seconds of each stage of the last start of a subject, a model with its settings, are kept in a file of the user's
cache folder. If the folder cannot be read or written, the only effect is that no time left is shown.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from mlx_tandem import files
from mlx_tandem.config import Config

log = logging.getLogger(__name__)

MOST_KEPT = 64
"""Most files with the times of starts. Beyond that the oldest is removed."""

MOST_BYTES = 1 << 16
"""Most bytes of a file that is read."""

LAUNCH = "starting"
"""The first stage: the process is launched and imports its libraries."""


class Stage(Struct, frozen=True, forbid_unknown_fields=True):
    """A stage of a start."""

    name: str
    seconds: float
    once: bool = False
    """Whether only a start without kept choices has this stage."""


class StartTimes(Struct, frozen=True, forbid_unknown_fields=True):
    """The stages of one start, in their order."""

    model: str  # path of the folder
    ended: float  # seconds since 1970
    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the whole start."""
        return sum(stage.seconds for stage in self.stages)


class StartProgress(NamedTuple):
    """The progress of a start."""

    stage: str
    fraction: float
    """The share of the stage that is done, from 0 to 1, where the stage says so."""

    elapsed_s: float
    """Seconds since the engine was launched."""

    left_s: float | None
    """Seconds that are left by the last start of the same subject; None without one."""


class KeptTimes:
    """The times of the last start of one subject, in a file of a folder."""

    def __init__(self, folder: Path, config: Config):
        """Name the file by everything that a start depends on. Ports and keys are not among it."""
        self._model = config.engine.model.path
        facts = (config.engine, config.adapters, config.adapter_root, config.rl_training)
        digest = hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:32]
        self._file = folder / f"{digest}.json"

    def find(self) -> StartTimes | None:
        """Return the times of the last start; None if there are none that can be read."""
        return _read(self._file)

    def keep(self, stages: tuple[Stage, ...]) -> None:
        """Write the times of a start that has just ended."""
        text = msgspec.json.encode(StartTimes(self._model, time.time(), stages))
        try:
            files.make_folder(self._file.parent)
            files.replace(self._file, text)
            for old in _by_age(self._file.parent)[:-MOST_KEPT]:
                old.unlink(missing_ok=True)
        except OSError as e:
            log.info("the times of this start are not kept: %s", e)


def folder() -> Path:
    """Return the folder with the times of starts. It may not exist."""
    return files.cache_folder() / "starts"


def last_start() -> StartTimes | None:
    """Return the times of the last start of any server of this user; None if there are none that can be read."""
    found = _by_age(folder())
    return _read(found[-1]) if found else None


def _by_age(where: Path) -> list[Path]:
    """Return the files with times, the oldest first. Another process may remove some meanwhile."""
    used: dict[Path, float] = {}
    with contextlib.suppress(OSError):
        for file in where.glob("*.json"):
            with contextlib.suppress(OSError):
                used[file] = file.stat().st_mtime
    return sorted(used, key=used.__getitem__)


def _read(file: Path) -> StartTimes | None:
    """Return the times in a file; None if it cannot be read or holds something else."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            return msgspec.json.decode(opened.read(MOST_BYTES), type=StartTimes)
    except (OSError, msgspec.MsgspecError):
        return None


class StartClock:
    """Measures the stages of one start after the other."""

    def __init__(self, kept: KeptTimes | None = None, now: Callable[[], float] = time.monotonic):
        """Create a clock that has not begun.

        Args:
            kept: The times of the last start, which this clock replaces when a start ends; None: nothing is known and
                nothing is kept.
            now: Returns seconds.
        """
        self._kept, self._now = kept, now
        self._last = None if kept is None else kept.find()
        self.begin()

    def begin(self) -> None:
        """Begin a start."""
        self._stages: list[Stage] = []
        self._began = self._entered = self._now()
        self._name, self._fraction, self._once = LAUNCH, 0.0, False

    def enter(self, stage: str, fraction: float = 0.0, *, once: bool = False) -> None:
        """Note that a share of a stage is done, and if it is another stage, that the one before has ended."""
        if stage != self._name:
            self._leave()
            self._name, self._once = stage, once
        self._fraction = fraction

    def end(self) -> tuple[Stage, ...]:
        """Note that the start has ended and return its stages."""
        self._leave()
        self._last = StartTimes("", time.time(), tuple(self._stages))
        return self._last.stages

    def keep(self) -> None:
        """Write the times of the start that has ended. It may take milliseconds."""
        if self._kept is not None and self._last is not None:
            self._kept.keep(self._last.stages)

    def progress(self) -> StartProgress:
        """Return how far the start has come by now."""
        left = self._left()
        return StartProgress(
            self._name,
            round(self._fraction, 3),
            round(self._now() - self._began, 1),
            None if left is None else round(left, 1),
        )

    def _left(self) -> float | None:
        """Return the seconds that are left.

        Stages that only a start without kept choices has are expected once this start has had one of them.
        """
        if self._last is None:
            return None
        took = {stage.name: stage.seconds for stage in self._last.stages}
        if self._once and self._name not in took:
            return None
        over = {stage.name for stage in self._stages}
        anew = self._once or any(stage.once for stage in self._stages)
        own = max(took.get(self._name, 0.0) - (self._now() - self._entered), 0.0)
        return own + sum(
            stage.seconds
            for stage in self._last.stages
            if stage.name not in over and stage.name != self._name and (anew or not stage.once)
        )

    def _leave(self) -> None:
        """End the present stage. One that came before is continued: its seconds are added."""
        now = self._now()
        seconds, self._entered = now - self._entered, now
        for i, stage in enumerate(self._stages):
            if stage.name == self._name:
                self._stages[i] = Stage(stage.name, stage.seconds + seconds, stage.once)
                return
        self._stages.append(Stage(self._name, seconds, self._once))
