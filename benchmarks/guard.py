"""How often the guard errs, and how soon it finds what is worse, in simulated runs of its own classes.

    python -m benchmarks.guard --runs 500 --out benchmarks/results/guard.json

Live traffic asks prompts whose probability of a right answer is drawn from Beta(0.4, 0.6), in groups of eight. An
update comes when as many answers of groups whose rewards differ have come as `update_frequency` says. Validation
prompts are answered four times by both versions, and more often while the later one looks worse. A server draws the
answers of both with the same seeds, so that versions which differ little give the same answers: `alike` is the share of
the answers for which that is so. Where nothing else is said it is 0, which is the worst case.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.config import RLTrainingConfig
from mlx_tandem.training.online.arms import Arms
from mlx_tandem.training.online.judging import TOLERATED
from mlx_tandem.training.online.trial import Reference, Trial
from mlx_tandem.types import AdapterRef

SETTINGS = RLTrainingConfig()
GROUP = 8
UPDATES = 200
WITHIN = 30
"""Updates within which a version that is worse has to be found."""


@dataclass
class Run:
    """The outcome of one run."""

    rollbacks: int = 0
    first: int | None = None  # the update after which the first rollback came
    compared: float = 0.0  # share of the prompts that both versions answered
    kept: float = 1.0  # share of the drift that was there at the end


class Simulated:
    """A guard over simulated versions. `ability(version)` is what a version adds to a prompt's probability."""

    def __init__(self, seed: int, per_update: int = SETTINGS.guard_prompts) -> None:
        self.rng = np.random.default_rng(seed)
        self.trial = Trial()
        self.arms = Arms(per_update, random.Random(seed))
        self.run = Run()
        self.version = self.last = 1
        self.trial.propose(reference(1))
        self.update = 0

    @property
    def accepted(self) -> int:
        """The number of the accepted version."""
        assert self.trial.accepted is not None
        return self.trial.accepted.version

    def compare(self, difference: float, tolerated: float = 0.0) -> bool:
        """Count a comparison; return whether it led to a rollback, which is done then."""
        self.trial.compare(difference, tolerated, SETTINGS.guard_false_accept)
        if not self.trial.is_worse(SETTINGS.guard_false_rollback):
            return False
        self.run.rollbacks += 1
        self.run.first = self.update if self.run.first is None else self.run.first
        self.version = self.accepted
        self.trial.begin(self.trial.accepted)
        return True

    def publish(self) -> None:
        """Publish another version, and save it where it is time for a candidate."""
        self.update += 1
        self.last += 1
        self.version = self.last
        self.trial.updates += 1
        self.arms.updated()
        if self.trial.wants_candidate:
            self.trial.propose(reference(self.version))


def reference(version: int) -> Reference:
    """Return a version as its checkpoint."""
    return Reference(f"guard-{version}", version, str(version))


def ref(version: int) -> AdapterRef:
    """Return a version as the engine knows it."""
    return AdapterRef("policy", version, str(version))


def live(
    seed: int,
    frequency: int,
    worse: Callable[[int], float] = lambda version: 0.0,
    traffic: Callable[[int], float] = lambda update: 1.0,
    updates: int = UPDATES,
    per_update: int = SETTINGS.guard_prompts,
) -> Run:
    """Run live traffic with a control arm. `worse(version)` is taken off the probability of a right answer, which
    `traffic(update)` multiplies.
    """
    guard = Simulated(seed, per_update)
    prompts = compared = 0
    while guard.update < updates:
        usable = 0
        while usable < frequency:
            p = guard.rng.beta(0.4, 0.6) * traffic(guard.update)
            newest, accepted = ref(guard.version), ref(guard.accepted)
            pair = guard.arms.choose(newest, accepted, guard.trial.comparison.effort)
            prompts += 1
            rewards = {}
            for version in {guard.version} if pair is None else {guard.version, guard.accepted}:
                rewards[version] = int(guard.rng.binomial(GROUP, max(p - worse(version), 0.0)))
            usable += GROUP * (0 < rewards[guard.version] < GROUP)
            if pair is not None:
                compared += 1
                if guard.compare((rewards[newest.version] - rewards[accepted.version]) / GROUP):
                    break
        guard.publish()
    guard.run.compared = compared / prompts
    return guard.run


@dataclass(frozen=True)
class Validated:
    """A policy that only validation prompts judge. Its logits rise by `drift` over the run, and each version answers
    a share of the prompts, another one each time, the other way round. From update `at` on it is worse by 0.10.
    """

    prompts: int = 32
    drift: float = 4.0
    flips: float = 0.1
    at: int = UPDATES
    alike: float = 0.0


def drifting(seed: int, policy: Validated = Validated()) -> Run:
    """Run with validation prompts only."""
    prompts, drift, at = policy.prompts, policy.drift, policy.at
    guard = Simulated(seed, 0)
    base = guard.rng.logistic(-1.0, 1.5, prompts)
    gained = {1: 0.0}
    turned = {1: np.zeros(prompts, bool)}

    def right(version: int) -> Any:
        p = 1 / (1 + np.exp(-(base + gained[version])))
        p = np.where(turned[version], 1 - p, p) - 0.1 * (version > at + 1)
        return np.maximum(p, 0.0)[:, None]

    while guard.update < min(UPDATES, at + WITHIN):
        candidate = guard.last + 1
        gained[candidate] = gained[guard.version] + drift / UPDATES
        turned[candidate] = guard.rng.random(prompts) < policy.flips
        n = round(SETTINGS.validation_answers * guard.trial.comparison.effort)
        noise, other = guard.rng.random((2, prompts, n))
        other = np.where(guard.rng.random((prompts, n)) < policy.alike, noise, other)
        new, old = (noise < right(candidate)).mean(1), (other < right(guard.accepted)).mean(1)
        before = guard.run.rollbacks
        for difference in new - old:
            if guard.compare(float(difference), SETTINGS.guard_reward_drop * TOLERATED):
                break
        if guard.run.rollbacks == before:
            guard.publish()
        else:
            guard.update, guard.last = guard.update + 1, guard.last + 1
    guard.run.kept = gained[guard.version] / drift
    return guard.run


def constant(seed: int, frequency: int) -> Run:
    """A policy that stays as it is."""
    return live(seed, frequency)


def shifted(seed: int, frequency: int) -> Run:
    """Prompts that become half as likely to be answered after half of the run."""
    return live(seed, frequency, traffic=lambda update: 1.0 if update < UPDATES // 2 else 0.5)


def fallen(seed: int, frequency: int, at: int) -> Run:
    """A policy that is worse by 0.10 from one update on."""
    return live(seed, frequency, worse=lambda version: 0.1 if version > at + 1 else 0.0, updates=at + WITHIN)


def still_validated(seed: int) -> Run:
    """A policy that stays as it is, with validation prompts only."""
    return drifting(seed, Validated(drift=1e-9, flips=0.0))


def fallen_validated(seed: int, at: int, alike: float) -> Run:
    """A policy that is worse by 0.10 from one update on, with validation prompts only."""
    return drifting(seed, Validated(drift=1e-9, flips=0.0, at=at, alike=alike))


def figures(runs: int, workers: int) -> dict[str, Any]:
    """Return the figures of all scenarios."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(workers) as pool:

        def all_of(run: Callable[[int], Run]) -> list[Run]:
            return list(pool.map(run, range(runs), chunksize=5))

        for frequency in (32, 100):
            for name, scenario in (("constant", constant), ("traffic shifts", shifted)):
                made = all_of(partial(scenario, frequency=frequency))
                found[f"{name}, {frequency}"] = {
                    "runs with a rollback": sum(r.rollbacks > 0 for r in made) / runs,
                    "prompts compared": round(float(np.mean([r.compared for r in made])), 3),
                }
            for at in (5, 50, 150):
                made = all_of(partial(fallen, frequency=frequency, at=at))
                found[f"worse by 0.10 from update {at}, {frequency}"] = _found(made, at)
        made = all_of(drifting)
        found["drift by 4 logits, 32 validation prompts"] = {
            "drift kept, median": round(float(np.median([r.kept for r in made])), 3),
            "drift kept, 5th percentile": round(float(np.quantile([r.kept for r in made], 0.05)), 3),
            "runs with a rollback": sum(r.rollbacks > 0 for r in made) / runs,
        }
        for at in (5, 50, 150):
            for alike in (0.0, 0.5):
                made = all_of(partial(fallen_validated, at=at, alike=alike))
                found[f"worse by 0.10 from update {at}, 32 validation prompts, {alike:.0%} alike"] = _found(made, at)
        made = all_of(still_validated)
        found["constant, 32 validation prompts"] = {"runs with a rollback": sum(r.rollbacks > 0 for r in made) / runs}
    return found


def _found(made: Sequence[Run], at: int) -> dict[str, Any]:
    """Return how often a version that is worse from update `at` on was found, and how soon."""
    hit = [r.first - at for r in made if r.first is not None and r.first >= at]
    return {
        f"found within {WITHIN} updates": len(hit) / len(made),
        "median updates": float(np.median(hit)) if hit else None,
    }


def main() -> None:
    """Write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = {k: v for k, v in asdict_of(SETTINGS).items() if k.startswith(("guard", "validation"))}
    result = describe() | {"command": " ".join(["-m benchmarks.guard", *sys.argv[1:]])}
    result |= {"runs": args.runs, "updates": UPDATES, "group": GROUP, "settings": settings}
    result["scenarios"] = figures(args.runs, args.workers)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


def asdict_of(settings: RLTrainingConfig) -> dict[str, Any]:
    """Return settings as plain data."""
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


if __name__ == "__main__":
    main()
