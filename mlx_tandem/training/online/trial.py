"""Which version is accepted, which may be next, and what comparisons say of the versions that are served since.

The accepted version is the one that rollbacks return to. It moves on only to a version that is shown to answer better.
Both are checkpoints, so that the optimiser's state of either is there whenever it is needed.
"""

from __future__ import annotations

from msgspec import Struct, field

from mlx_tandem.training.evidence import Comparison, Evidence

CANDIDATE_UPDATES = 10
"""Updates after which the version of that moment becomes the candidate."""

CANDIDATE_PROMPTS = 8
"""Fewest prompts on which a candidate, or versions made of it, must have been compared before it is accepted."""


class Reference(Struct, frozen=True):
    """A version whose whole state lies in a checkpoint."""

    checkpoint: str
    version: int
    digest: str


class Trial(Struct):
    """The state of the guard, which checkpoints and the database keep."""

    accepted: Reference | None = None
    candidate: Reference | None = None
    updates: int = 0  # since the candidate, or else since the accepted version
    candidate_prompts: int = 0  # compared since the candidate
    candidate_total: float = 0.0  # sum of their differences
    comparison: Comparison = field(default_factory=Comparison)
    gained: float = 0.0  # sum of the mean differences by which versions were shown to be better and accepted

    def begin(self, accepted: Reference | None) -> None:
        """Compare with this version from now on, and forget every comparison before."""
        if accepted != self.accepted:  # one that was not shown to be better than the last
            self.gained = 0.0
        self.accepted = accepted
        self.comparison = Comparison()
        self._next(None)

    def propose(self, saved: Reference) -> None:
        """Make a version that is being saved the accepted one if there is none, or the candidate if it is time for
        another.
        """
        if self.accepted is None:
            self.begin(saved)
        elif self.wants_candidate:
            self._next(None if saved.digest == self.accepted.digest else saved)

    def _next(self, candidate: Reference | None) -> None:
        self.candidate = candidate
        self.updates = self.candidate_prompts = 0
        self.candidate_total = 0.0

    def compare(self, difference: float, tolerated: float, false_accept: float) -> bool:
        """Count how much better than by the accepted version a prompt was answered, and by how much it may be worse;
        return whether that accepts the candidate.

        All versions since the accepted one are shown to be better then, and those since the candidate do not
        contradict.
        """
        self.comparison.add(difference, tolerated)
        self.candidate_prompts += 1
        self.candidate_total += difference
        if (
            self.candidate is None
            or self.candidate_prompts < CANDIDATE_PROMPTS
            or self.candidate_total <= 0
            or not self.comparison.gain.rejects(false_accept)
        ):
            return False
        self.accepted = self.candidate
        self.gained += self.comparison.mean
        self.comparison.gain = Evidence()
        self.comparison.count, self.comparison.total = 0, 0.0
        self._next(None)
        return True

    def is_worse(self, false_rollback: float) -> bool:
        """Return whether the versions since the accepted one are shown to be worse."""
        return self.comparison.harm.rejects(false_rollback)

    @property
    def wants_candidate(self) -> bool:
        """Whether it is time for an accepted version or another candidate."""
        return self.accepted is None or self.updates >= CANDIDATE_UPDATES

    @property
    def checkpoints(self) -> frozenset[str]:
        """Names of the checkpoints that are needed."""
        return frozenset(r.checkpoint for r in (self.accepted, self.candidate) if r is not None)
