"""Reports of a server's learning: metrics and samples of each update, for writers and for who watches."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from mlx_tandem.config import Config
from mlx_tandem.training.metrics.recorder import Recorder, openers
from mlx_tandem.training.metrics.writer import Sample
from mlx_tandem.training.online.serving import UpdateReport
from mlx_tandem.training.trajectories import Trajectory

log = logging.getLogger(__name__)

NUMBERS = (
    "loss", "mean_reward", "grad_norm", "kl", "kl_reference", "mismatch_k3", "learning_rate", "agreement",
    "trajectories", "tokens", "groups", "skipped_groups", "seconds", "validation", "version",
)  # fmt: skip
"""Numbers of an update that are recorded, under their names in its report."""

TextOf = Callable[[Sequence[int]], str]
"""A function that returns the text of tokens."""

KEPT_SAMPLES = 8
"""Samples that are kept in memory for who watches."""


class KeptSample(Struct, frozen=True):
    """An answer of the policy that an update learned from, with the text of its prompt without the roles."""

    step: int
    prompt: str
    completion: str
    reward: float | None


class Reporting:
    """Reports every update. Nothing here waits for a writer."""

    def __init__(self, config: Config, text_of: TextOf, said_of: TextOf):
        """Open the writers that the settings name.

        `text_of` returns the text of tokens, and `said_of` the text of a prompt for people who watch.
        """
        training = config.rl_training
        folder = Path(config.checkpointing.checkpoint_dir).absolute()
        file = Path(training.metrics_file) if training.metrics_file else None
        settings: dict[str, Any] = msgspec.to_builtins(training)
        self._recorder = Recorder(openers(file, training.report_to, folder, training.adapter, settings))
        self._count = training.metrics_samples
        self._text_of, self._said_of = text_of, said_of
        self.samples: deque[KeptSample] = deque(maxlen=KEPT_SAMPLES)
        """The newest samples."""

    def updated(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        """Record an update that has ended, and some of the answers that it learned from. Raises nothing."""
        try:
            self._record(report, trajectories)
        except Exception:
            log.exception("an update was not reported")

    def _record(self, report: UpdateReport, trajectories: Sequence[Trajectory]) -> None:
        numbers = {name: getattr(report, name) for name in NUMBERS}
        ended = {"published": float(report.outcome == "published"), "undone": float(report.outcome == "rolled_back")}
        self._recorder.scalars("update", report.step, numbers | ended)
        samples = []
        for t in trajectories[: self._count]:
            samples.append(Sample(self._text_of(t.prompt), self._text_of(t.tokens), t.reward))
            short = Sample(self._said_of(t.prompt), samples[-1].completion, t.reward).shortened()
            self.samples.append(KeptSample(report.step, short.prompt, short.completion, short.reward))
        self._recorder.samples(report.step, samples)

    def close(self) -> None:
        """Write what is left. May take as long as the writers do."""
        self._recorder.close()
