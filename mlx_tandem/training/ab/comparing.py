"""One A/B test: which arms of an alias are compared, what is known of them, and what that decides.

Each arm but the control is a challenger. A score of one of its answers is compared with the newest score of the
control that no other of its scores was compared with, and the difference is one bet of the guard's sequential test
(`training/evidence.py`). Which two scores meet does not depend on what they are. So two arms that answer alike
have differences with the mean 0, and the probability that any of several challengers is ever promoted without being
better is `false_promotion` at most: each of them has its share of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct, field

from mlx_tandem import limits
from mlx_tandem.config import ABTest, Arm
from mlx_tandem.errors import InvalidRequest
from mlx_tandem.training.evidence import Comparison

WAITING = 16
"""Most scores of an arm that wait to be compared; the oldest is left out then, since questions change with time."""

Verdict = Literal["promoted", "taken_back"]
"""The decision about a challenger.

promoted: it was shown to be better than the control, and answers alone. taken_back: it was shown to be worse, and
answers no more.
"""


class Scores(Struct):
    """The scores of one arm that count."""

    answers: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean score; None before the first."""
        return self.total / self.answers if self.answers else None


class Challenger(Struct):
    """The comparisons of one challenger with the control, and its scores that wait for one."""

    comparison: Comparison = field(default_factory=Comparison)
    waiting: list[float] = []  # scores of one side that were not compared yet, oldest first
    control_waits: bool = False  # they are those of the control
    verdict: Verdict | None = None

    def add(self, score: float, *, of_control: bool) -> bool:
        """Count a score of the challenger or of the control; return whether it was compared with another."""
        if not self.waiting or self.control_waits == of_control:
            self.waiting, self.control_waits = [*self.waiting[-WAITING + 1 :], score], of_control
            return False
        other = self.waiting.pop()
        self.comparison.add(other - score if of_control else score - other)
        return True

    def decide(self, better: float, worse: float, least: int) -> Verdict | None:
        """Return what the comparisons decide at these error rates, after `least` of them or more.

        A verdict never contradicts the plain mean of the differences.
        """
        comparison = self.comparison
        if comparison.count < least:
            return None
        if comparison.mean > 0.0 and comparison.gain.rejects(better):
            return "promoted"
        if comparison.mean < 0.0 and comparison.harm.rejects(worse):
            return "taken_back"
        return None


class AliasTest(Struct):
    """The state of the test of one alias, which the database keeps."""

    id: str
    alias: str
    settings: ABTest
    arms: tuple[Arm, ...]
    """The arms with which the test has begun, with the weights that were set last."""
    configured: tuple[tuple[Arm, ...] | None, ABTest | None]
    """The arms and the test of this alias in the server's settings when the test began."""
    began: float  # Unix seconds
    scores: dict[str, Scores]  # by arm
    challengers: dict[str, Challenger]
    decided: float | None = None  # when it has ended; Unix seconds

    @staticmethod
    def begin(
        id: str,
        alias: str,
        settings: ABTest,
        arms: Sequence[Arm],
        configured: tuple[tuple[Arm, ...] | None, ABTest | None],
        now: float,
    ) -> AliasTest:
        """Return a test of these arms, which `check` has accepted, without any scores."""
        names = [arm.adapter for arm in arms]
        challengers = {name: Challenger() for name in names if name != settings.control}
        scores = {name: Scores() for name in names}
        return AliasTest(id, alias, settings, tuple(arms), configured, now, scores, challengers)

    @property
    def serving(self) -> tuple[Arm, ...]:
        """The arms that answer now: the promoted one, or all that were not taken back."""
        verdicts = {name: each.verdict for name, each in self.challengers.items()}
        if "promoted" in verdicts.values():
            return tuple(arm for arm in self.arms if verdicts.get(arm.adapter) == "promoted")
        return tuple(arm for arm in self.arms if verdicts.get(arm.adapter) is None)

    def continues(self, settings: ABTest, arms: Sequence[Arm]) -> bool:
        """Return whether a test with these settings and arms is this one, but for its weights."""
        same = {arm.adapter for arm in arms} == {arm.adapter for arm in self.serving}
        return self.decided is None and self.settings == settings and same

    def weigh(self, arms: Sequence[Arm]) -> None:
        """Take the weights of these arms, which are those that serve."""
        weights = {arm.adapter: arm for arm in arms}
        self.arms = tuple(weights.get(arm.adapter, arm) for arm in self.arms)

    def add(self, adapter: str, score: float, now: float) -> list[tuple[str, Verdict]]:
        """Count the score of an answer by an arm that serves; return the verdicts that follow, of at most one promoted
        challenger.

        A score that is not a finite number counts for nothing.
        """
        if self.decided is not None or not math.isfinite(score):
            return []
        own = self.scores[adapter]
        own.answers += 1
        own.total += score
        control, count = self.settings.control, len(self.challengers)
        found: list[tuple[str, Verdict]] = []
        for name, each in self.challengers.items():
            if each.verdict is not None or adapter not in (name, control):
                continue
            if not each.add(score, of_control=adapter == control):
                continue
            better, worse = self.settings.false_promotion / count, self.settings.false_take_back / count
            verdict = each.decide(better, worse, self.settings.min_answers)
            if verdict is not None:
                each.verdict = verdict
                found.append((name, verdict))
            if verdict == "promoted":
                break
        if found and len(self.serving) == 1:
            self.decided = now
        return found


def check(settings: ABTest, arms: Sequence[Arm]) -> None:
    """Raise InvalidRequest naming the field unless these arms of an alias can be tested."""
    for name in ("false_promotion", "false_take_back", "min_answers"):
        limits.check(name, getattr(settings, name), f"ab_test.{name}")
    names = [arm.adapter for arm in arms]
    if settings.control not in names:
        raise InvalidRequest(
            f"ab_test.control is {settings.control[:140]!r}, but the arms are {', '.join(names)[:300]}",
            param="ab_test.control",
        )
    if len(names) < 2:
        raise InvalidRequest("ab_test needs two arms or more: the control and what it is compared with", param="arms")
    for i, arm in enumerate(arms):
        if not arm.weight:
            raise InvalidRequest(f"ab_test needs a weight above 0 in arms[{i}].weight", param=f"arms[{i}].weight")
