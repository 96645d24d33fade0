"""Which version is accepted, which may be next, and what begins afresh when one of them changes."""

from __future__ import annotations

from mlx_tandem.training.evidence import Comparison, Evidence
from mlx_tandem.training.online.trial import CANDIDATE_PROMPTS, CANDIDATE_UPDATES, Reference, Trial

A, B, SAME_AS_A = Reference("a", 1, "d1"), Reference("b", 2, "d2"), Reference("c", 3, "d1")
MANY = 100  # prompts, after which gains that never fail are shown for sure


def with_candidate(gains: int = MANY) -> Trial:
    """A trial whose candidate came after so many prompts that were answered better than by the accepted version."""
    trial = Trial()
    trial.propose(A)
    for _ in range(gains):
        assert not trial.compare(1.0, 0.0, 0.05), "there is no candidate"
    trial.updates = CANDIDATE_UPDATES
    trial.propose(B)
    return trial


def test_the_first_version_is_accepted_and_candidates_follow_after_some_updates() -> None:
    trial = Trial()
    assert trial.wants_candidate and trial.checkpoints == set()
    trial.propose(A)
    assert (trial.accepted, trial.candidate, trial.checkpoints) == (A, None, {"a"})
    trial.updates = CANDIDATE_UPDATES - 1
    assert not trial.wants_candidate
    trial.propose(B)
    assert (trial.candidate, trial.updates) == (None, CANDIDATE_UPDATES - 1)
    trial.updates += 1
    assert trial.wants_candidate
    trial.propose(B)
    assert (trial.accepted, trial.candidate, trial.updates, trial.checkpoints) == (A, B, 0, {"a", "b"})
    trial.updates = CANDIDATE_UPDATES
    trial.propose(SAME_AS_A)
    assert (trial.candidate, trial.updates) == (None, 0), "the accepted version is no candidate"


def test_a_candidate_is_accepted_after_prompts_of_its_own() -> None:
    """What was shown before it counts for the evidence, and not for the number of its prompts."""
    trial = with_candidate()
    assert (trial.candidate_prompts, trial.candidate_total) == (0, 0.0)
    took = [trial.compare(1.0, 0.0, 0.05) for _ in range(CANDIDATE_PROMPTS)]
    assert took == [False] * (CANDIDATE_PROMPTS - 1) + [True]
    assert (trial.accepted, trial.candidate, trial.updates, trial.candidate_prompts) == (B, None, 0, 0)
    assert (trial.candidate_total, trial.comparison.gain) == (0.0, Evidence())
    assert (trial.comparison.count, trial.comparison.total, trial.comparison.mean) == (0, 0.0, 0.0)
    assert trial.comparison.seen == MANY + CANDIDATE_PROMPTS, "the scale of differences is that of all before"
    assert trial.comparison.harm.count == MANY + CANDIDATE_PROMPTS


def test_only_what_was_accepted_is_a_gain() -> None:
    trial = with_candidate()
    assert trial.comparison.mean == 1.0 and trial.gained == 0.0, "it may be chance so far"
    assert any(trial.compare(1.0, 0.0, 0.05) for _ in range(CANDIDATE_PROMPTS))
    assert trial.gained == 1.0
    trial.begin(trial.accepted)
    assert trial.gained == 1.0, "after a rollback it is still served"
    trial.begin(A)
    assert trial.gained == 0.0, "nobody has compared this one with an earlier one"


def test_a_candidate_that_is_no_better_is_not_accepted() -> None:
    for difference in (0.0, -0.01):
        trial = with_candidate()
        assert not any(trial.compare(difference, 0.0, 0.05) for _ in range(2 * CANDIDATE_PROMPTS))
        assert (trial.accepted, trial.candidate, trial.candidate_prompts) == (A, B, 2 * CANDIDATE_PROMPTS)
    trial = with_candidate(gains=0)
    assert not any(trial.compare(1.0, 0.0, 1e-9) for _ in range(CANDIDATE_PROMPTS)), "it is not shown yet"


def test_a_trial_that_begins_forgets_everything_before() -> None:
    trial = with_candidate()
    for _ in range(MANY):
        trial.compare(-1.0, 0.0, 0.05)
    assert trial.is_worse(0.05)
    trial.updates = 3
    trial.begin(A)
    assert trial == Trial(accepted=A, comparison=Comparison()) and not trial.is_worse(0.05)


def test_what_is_tolerated_is_no_harm() -> None:
    harmed, tolerated = Trial(accepted=A), Trial(accepted=A)
    for _ in range(MANY):
        harmed.compare(-0.1, 0.05, 0.05)
        tolerated.compare(-0.1, 0.1, 0.05)
    assert harmed.is_worse(0.05) and not tolerated.is_worse(0.05)
    assert tolerated.comparison.total == harmed.comparison.total < 0
