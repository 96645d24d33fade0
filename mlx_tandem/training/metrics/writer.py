"""The protocol of writers of metrics, and the plain data that they get."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, cast, get_args

from msgspec import Struct

from mlx_tandem.errors import InvalidRequest, TandemError
from mlx_tandem.explain import installing

Tracker = Literal["tensorboard", "wandb", "trackio"]
"""Trackers that metrics can be reported to. Each is an extra of the same name and a package of the same name."""

MAX_TEXT = 2000
"""Most characters of a text of a sample; the middle of a longer one is left out."""


class Sample(Struct, frozen=True):
    """One answer during learning."""

    prompt: str
    completion: str
    reward: float | None = None
    expected: str | None = None

    def shortened(self) -> Sample:
        """Return the sample with texts of at most about MAX_TEXT characters."""
        expected = None if self.expected is None else _short(self.expected)
        return Sample(_short(self.prompt), _short(self.completion), self.reward, expected)


class Passing(Exception):
    """An entry could not be written, and later ones may be: the drive is full, for example."""


class Writer(Protocol):
    """A place that metrics go to. All methods are called on one thread, which may wait in them; whatever they raise
    ends this writer only, except Passing.
    """

    def scalars(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of one kind, such as "step" or "evaluation", at a step of the optimiser."""

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Write answers at a step of the optimiser."""

    def close(self) -> None:
        """Write what is left and release everything."""


class MissingExtra(TandemError):
    """A tracker's package is not installed; the message names the extra that brings it."""

    code = "missing_extra"


def require(trackers: Sequence[str]) -> None:
    """Raise MissingExtra for the first tracker whose package is not installed."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"reporting to {name} needs a package: {installing(name)}", param="report_to")


def trackers(text: str) -> tuple[Tracker, ...]:
    """Return the trackers that a list with commas names. Raises InvalidRequest for another name."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in get_args(Tracker):
            raise InvalidRequest(
                f"there is no tracker {name[:40]!r}; there are {', '.join(get_args(Tracker))}", param="report_to"
            )
    return cast("tuple[Tracker, ...]", names)


def _short(text: str) -> str:
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]} … {text[-half:]}"
