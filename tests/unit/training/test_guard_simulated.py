"""What the guard promises, on a few simulated runs; `benchmarks/guard.py` has many."""

from __future__ import annotations

from benchmarks.guard import WITHIN, constant, drifting, fallen, fallen_validated, shifted, still_validated


def test_a_policy_that_stays_as_it_is_stays() -> None:
    assert sum(constant(seed, 100).rollbacks > 0 for seed in range(12)) <= 1
    assert sum(shifted(seed, 100).rollbacks > 0 for seed in range(12)) <= 1


def test_a_version_that_is_worse_by_a_tenth_is_found() -> None:
    first = [fallen(seed, 32, 20).first for seed in range(12)]
    assert sum(at is not None and 20 <= at < 20 + WITHIN for at in first) >= 10


def test_what_a_policy_has_learned_is_kept() -> None:
    assert min(drifting(seed).kept for seed in range(3)) > 0.9


def test_validation_prompts_alone_find_what_is_worse_by_a_tenth() -> None:
    first = [fallen_validated(seed, 20, 0.5).first for seed in range(10)]
    assert sum(at is not None and 20 <= at < 20 + WITHIN for at in first) >= 9
    assert not any(still_validated(seed).rollbacks for seed in range(2))
