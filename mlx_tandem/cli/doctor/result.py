"""The words of the doctor: a check, what it found, and how it fails."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal["ok", "note", "failed", "skipped"]
Figures = dict[str, float | int | str]


class Check(Struct, frozen=True):
    """`run` is `module:function`; the function takes the `Bench` of the process it runs in and returns an Outcome, or
    raises, best of all Failed."""

    name: str
    meaning: str  # what it is worth to know, in one sentence
    run: str
    seconds: float  # that it may take
    needs: str = ""  # another check that must not have failed


class Outcome(Struct, frozen=True):
    """A check that has not failed. `advice`: it works, but there is something to do about it."""

    says: str
    figures: Figures = {}
    advice: str = ""


class Failed(Exception):
    """A check that has failed: what was found, and what to do about it where that is known."""

    def __init__(self, says: str, advice: str = "", figures: Figures | None = None):
        super().__init__(says)
        self.says, self.advice, self.figures = says, advice, figures or {}


class Finding(Struct, frozen=True):
    """What became of a check."""

    check: str
    meaning: str
    status: Status
    says: str
    advice: str = ""
    figures: Figures = {}
    detail: str = ""  # the last lines that the process wrote before it failed
    seconds: float = 0.0
