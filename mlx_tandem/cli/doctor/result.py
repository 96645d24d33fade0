"""The doctor's data: a check, its outcome, its failure, and the finding that is reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Status = Literal["ok", "note", "failed", "skipped"]
"""How a check ended; "note" means that it works but something can be improved."""

Figures = dict[str, float | int | str]
"""Numbers of a check by name."""


class Check(Struct, frozen=True):
    """A check: the function `run` takes the `Bench` of its process and returns an Outcome or raises, preferably
    Failed.
    """

    name: str
    meaning: str  # what is checked, in one sentence
    run: str  # `module:function`
    seconds: float  # longest time that it may take
    needs: str = ""  # name of another check, without which it is skipped
    usual: float = 1.0  # seconds that it takes on an ordinary machine, from which the time that is left is estimated
    hint: str = ""  # what the user may do meanwhile
    alone: bool = False  # whether it has a process of its own
    environment: Mapping[str, str] = {}  # variables of its process, where it is alone


class Outcome(Struct, frozen=True):
    """The outcome of a check that has not failed. `advice` says what could be improved."""

    says: str
    figures: Figures = {}
    advice: str = ""
    table: Figures = {}  # numbers that the report shows as a table


class Failed(Exception):
    """A check has failed: what was found, and what to do about it if that is known."""

    def __init__(self, says: str, advice: str = "", figures: Figures | None = None):
        super().__init__(says)
        self.says, self.advice, self.figures = says, advice, figures or {}


class NotHere(Exception):
    """A check does not apply to this machine; the message says why."""


class Finding(Struct, frozen=True):
    """The report about a check."""

    check: str
    meaning: str
    status: Status
    says: str
    advice: str = ""
    figures: Figures = {}
    detail: str = ""  # the last lines that the process wrote before it failed
    seconds: float = 0.0
    table: Figures = {}  # numbers that the report shows as a table
