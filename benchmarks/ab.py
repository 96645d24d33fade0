"""How often A/B tests of aliases err, and how many answers they need, in simulated runs of the product's own classes.

    python -m benchmarks.ab --runs 200 --equal-runs 2000 --out benchmarks/results/ab.json

Each answer comes from the arm that the alias chooses, and gets a score that is drawn for its arm; a run ends with its
test or after `--answers` answers. Arms that answer alike have more runs, since their errors are what is promised. All
of them have the error rates of the defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlx_tandem.adapters.aliases import Aliases
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.config import ABTest, Arm
from mlx_tandem.training.ab.comparing import AliasTest

SETTINGS = ABTest("old")
SHOWN = 200
"""Runs of which the errors are shown alone, too."""

Draw = Callable[[random.Random, float], float]
"""A score of an arm, when this share of the run is over."""


@dataclass(frozen=True)
class Case:
    """Arms with how their scores are drawn. Users have `each` answers, all judged by a taste of their own instead."""

    draws: dict[str, Draw]
    weights: tuple[float, ...] = ()
    each: int = 0  # 0: requests name no user
    once: bool = True  # a user counts once, as in the product


@dataclass
class Run:
    """The outcome of one run: the verdict of each challenger that got one, and after how many scored answers."""

    verdicts: dict[str, str]
    answers: int


def thumb(p: float) -> Draw:
    """A thumb that is up with probability `p`."""
    return lambda rng, over: float(rng.random() < p)


def normal(mean: float) -> Draw:
    """A real-valued score whose standard deviation is 1."""
    return lambda rng, over: rng.gauss(mean, 1.0)


def skewed(factor: float) -> Draw:
    """A score that is seldom very high: lognormal, so that few answers have most of the sum."""
    return lambda rng, over: factor * math.exp(rng.gauss(0.0, 1.0))


def harder(p: float) -> Draw:
    """A thumb on questions that become harder all the time, until a fourth as many answers are good."""
    return lambda rng, over: float(rng.random() < p * (1.0 - 0.75 * over))


def rarely_bad(rng: random.Random, over: float) -> float:
    """A score that is usually 0.1 better than that of `steady`, and as good on average."""
    return rng.gauss(0.6, 0.1) if rng.random() < 0.9 else rng.gauss(-0.4, 0.1)


def steady(rng: random.Random, over: float) -> float:
    """A score around 0.5."""
    return rng.gauss(0.5, 0.1)


PROMISED: dict[str, Case] = {
    "thumbs, 50 % up": Case({"old": thumb(0.5), "new": thumb(0.5)}),
    "thumbs, 10 % up": Case({"old": thumb(0.1), "new": thumb(0.1)}),
    "thumbs, 95 % up": Case({"old": thumb(0.95), "new": thumb(0.95)}),
    "thumbs, 50 % up, one of ten answers from the challenger": Case({"old": thumb(0.5), "new": thumb(0.5)}, (9, 1)),
    "thumbs, ever harder questions, one of ten from the challenger": Case(
        {"old": harder(0.8), "new": harder(0.8)}, (9, 1)
    ),
    "real-valued, normal": Case({"old": normal(0.0), "new": normal(0.0)}),
    "real-valued, lognormal": Case({"old": skewed(1.0), "new": skewed(1.0)}),
    "thumbs, three challengers": Case({name: thumb(0.5) for name in ("old", "new", "b", "c")}),
    "thumbs, users with 20 answers each": Case({"old": thumb(0.5), "new": thumb(0.5)}, each=20),
}
"""Arms that answer alike: the rates of errors are promised."""

OUTSIDE: dict[str, Case] = {
    "thumbs, users with 20 answers each, if every answer counted": Case(
        {"old": thumb(0.5), "new": thumb(0.5)}, each=20, once=False
    ),
    "equal means, one arm usually a little better and seldom much worse": Case({"old": steady, "new": rarely_bad}),
}
"""A way to count that would be wrong, and arms for which the test promises nothing."""

DIFFERENT: dict[str, Case] = {
    **{f"thumbs, 50 % against {50 + d} % up": Case({"old": thumb(0.5), "new": thumb(0.5 + d / 100)})
       for d in (30, 20, 10, 5, -5, -10, -20, -30)},
    "thumbs, 90 % against 95 % up": Case({"old": thumb(0.9), "new": thumb(0.95)}),
    "thumbs, 50 % against 70 % up, one of ten answers from the challenger": Case(
        {"old": thumb(0.5), "new": thumb(0.7)}, (9, 1)
    ),
    "real-valued, better by half a standard deviation": Case({"old": normal(0.0), "new": normal(0.5)}),
    "real-valued, worse by half a standard deviation": Case({"old": normal(0.0), "new": normal(-0.5)}),
    "real-valued, lognormal, 1.5 times as much": Case({"old": skewed(1.0), "new": skewed(1.5)}),
    "thumbs, 50 % against 70 % up and two challengers with 50 %": Case(
        {"old": thumb(0.5), "new": thumb(0.7), "b": thumb(0.5), "c": thumb(0.5)}
    ),
}  # fmt: skip
"""A challenger that is better or worse: how many answers it takes."""


def simulate(seed: int, case: Case, most: int) -> Run:
    """Return the outcome of one run of at most `most` scored answers."""
    rng = random.Random(seed)
    random.seed(seed)  # the alias draws an arm by it where a request names no user
    weights = case.weights or (1.0,) * len(case.draws)
    arms = [Arm(name, float(weight)) for name, weight in zip(case.draws, weights, strict=True)]
    aliases, test = Aliases(), AliasTest.begin("1", "chat", SETTINGS, arms, (None, None), 0.0)
    aliases.put("chat", arms)
    taste, counted, found = 0.0, 0, Run({}, 0)
    for n in range(1_000_000):
        if case.each and n % case.each == 0:
            taste = rng.choice((-0.4, 0.4))
        elif case.each and case.once:
            continue  # A user who has counted does not count again.
        chosen = aliases.choose("chat", f"{seed}-{n // case.each}" if case.each else None)
        assert chosen is not None
        score = case.draws[chosen.adapter](rng, counted / most)
        if case.each:
            score = float(rng.random() < 0.5 + taste)
        counted += 1
        for adapter, verdict in test.add(chosen.adapter, score, 0.0):
            found.verdicts[adapter] = verdict
            aliases.put("chat", test.serving)
        if test.decided is not None or counted >= most:
            break
    found.answers = counted
    return found


def errors(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the share of runs in which any arm was promoted, or any taken back."""

    def share(of: Sequence[Run], verdict: str) -> float:
        return sum(verdict in run.verdicts.values() for run in of) / len(of)

    found: dict[str, Any] = {}
    for verdict, name in (("promoted", "false promotions"), ("taken_back", "false take backs")):
        found[name] = share(runs, verdict)
        if len(runs) > SHOWN:
            found[f"{name} in the first {SHOWN} runs"] = share(runs[:SHOWN], verdict)
    return found


def power(runs: Sequence[Run]) -> dict[str, Any]:
    """Return what was decided about the challenger `new`, and how many scored answers of all arms it took."""
    decided = [run.answers for run in runs if run.verdicts.get("new")]
    verdicts = [run.verdicts.get("new") for run in runs]
    return {
        "promoted": verdicts.count("promoted") / len(runs),
        "taken back": verdicts.count("taken_back") / len(runs),
        "another promoted": sum(v == "promoted" for run in runs for k, v in run.verdicts.items() if k != "new")
        / len(runs),
        "median answers": float(np.median(decided)) if decided else None,
        "answers in nine of ten runs": float(np.quantile(decided, 0.9)) if decided else None,
    }


def figures(runs: int, equal_runs: int, most: int, workers: int) -> dict[str, Any]:
    """Return the figures of all cases."""
    found: dict[str, Any] = {}
    with ProcessPoolExecutor(workers) as pool:

        def all_of(case: str, count: int) -> list[Run]:
            return list(pool.map(partial(named, case=case, most=most), range(count), chunksize=5))

        for title, cases, count, what in (
            ("equal arms", PROMISED, equal_runs, errors),
            ("not promised", OUTSIDE, runs, errors),
            ("different arms", DIFFERENT, runs, power),
        ):
            found[title] = {name: what(all_of(name, count)) for name in cases}
    return found


def named(seed: int, case: str, most: int) -> Run:
    """Return the outcome of one run of the case with this name."""
    return simulate(seed, (PROMISED | OUTSIDE | DIFFERENT)[case], most)


def main() -> None:
    """Write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--equal-runs", type=int, default=2000)
    parser.add_argument("--answers", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = describe() | {"command": " ".join(["-m benchmarks.ab", *sys.argv[1:]])}
    result |= {"runs": args.runs, "equal_runs": args.equal_runs, "answers": args.answers}
    result["settings"] = {name: getattr(SETTINGS, name) for name in SETTINGS.__struct_fields__[1:]}
    result["cases"] = figures(args.runs, args.equal_runs, args.answers, args.workers)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
