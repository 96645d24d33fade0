"""One feedback: what somebody said of a completion, with the tokens that it is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

Source = Literal["api", "open_webui", "stored_completion"]
"""Where a feedback comes from: a request of this API, an export of Open WebUI, or one of stored completions."""

ALL = -1
"""The number of the choice where a feedback is about all choices of a completion."""


class Feedback(Struct, frozen=True, array_like=True):
    """What somebody said of a completion. A later one of the same completion and choice takes its place.

    `answers` are the tokens of the choice, or of all choices of its prompt where one of them is preferred. There are
    none where a text is only shown as an example (`corrected`).
    """

    completion: str  # its id
    choice: int  # ALL with `preferred`
    source: Source
    created: float  # Unix seconds
    adapter: str  # that answered; empty: the base
    version: int  # of the adapter; 0: the base, or unknown
    prompt: tuple[int, ...]
    answers: tuple[tuple[int, ...], ...]
    score: float | None = None  # from 0, a bad answer, to 1, a good one; a thumb is one of these two
    preferred: int = ALL  # the place in `answers` of the best one; ALL: nobody said which it is
    corrected: tuple[int, ...] = ()  # what should have been said
    comment: str = ""
    metadata: dict[str, Any] = {}

    @property
    def good(self) -> tuple[int, ...]:
        """The answer that this feedback calls good: the correction, the preferred one or one of a high score."""
        if self.corrected:
            return self.corrected
        if self.preferred != ALL:
            return self.answers[self.preferred]
        return self.answers[0] if self.score is not None and self.score > 0.5 else ()


class Stored(Struct, frozen=True):
    """A feedback in the store. `number` grows with each; `learned` counts the updates that learned from it."""

    number: int
    learned: int
    feedback: Feedback


def without(answers: Sequence[tuple[int, ...]], place: int) -> list[tuple[int, ...]]:
    """Return the answers but the one at `place`, and without others that are equal to it."""
    return [answer for i, answer in enumerate(answers) if i != place and answer != answers[place]]
