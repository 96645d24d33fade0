"""How many answers does learning need with a curriculum, and without? Prompts of all difficulties, five seeds.

    python benchmarks/curriculum.py --json-out benchmarks/results/curriculum.json

A client asks each of its questions once, and again after about 2,000 answers; the server chooses which of them it
answers in groups. A third of the questions are too easy, and a third too hard. "uniform" and "variance" are the same
server with `rl_training.curriculum` set to that, one after the other for each seed. `rollouts` are all answers, the
client's own included, until the mean reward on other questions, none of which is too easy, is as wanted.

What is reported is the task "sorting" with the seeds 0 to 4. The curriculum was tuned by simulations and by the task
"admitting" with the seed 100, and the number of questions and the wanted reward by "sorting" with the seed 101.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

from partial import Results, stop_cleanly
from rate import unknown
from taught import Teacher, run

from mlx_tandem.cli.demo.learner import POLICY, SETTINGS, SKILL
from mlx_tandem.cli.outputs import argument

RUNS = ("uniform", "variance")
GROUP = 8
TRAINING = SETTINGS | {"group_size": GROUP, "guard_prompts": 0}
ROOM = ("--max-model-len", "1024", "--num-blocks", "513", "--stall-seconds", "600")  # on a busy machine

EVERY = 256
"""Rollouts between two evaluations."""

AGAIN = 8
"""Evaluations after which the client asks all of its questions again, as it does at first."""

EACH = 4
"""Answers to each question of an evaluation."""

POLL_SECONDS = 0.05

IDLE_SECONDS = 10.0
"""Seconds without an answer after which the client asks all of its questions again, too."""


class Question(NamedTuple):
    """A question, its right answer, and the name of its scoring function."""

    text: str
    answer: str
    scoring: str = "exact_match"


def sorting(rng: random.Random, number: int) -> Question:
    """Return a question of sorting: one in three upwards, which the model knows, one in three of 3 to 7 digits
    downwards, at which it is right sometimes, and one in three of other lengths, at which it hardly ever is.
    """
    kind, length = number % 3, number // 3 % 5
    digits = [rng.randint(0, 9) for _ in range((2, 9, 10, 11, 12)[length] if kind == 2 else 3 + length)]
    text = " ".join(map(str, digits))
    ordered = " ".join(map(str, sorted(digits, reverse=kind > 0)))
    return Question(SKILL.format(text) if kind else f"Sort: {text}", ordered)


def admitting(rng: random.Random, number: int) -> Question:
    """Return what the model cannot know and should say so; one in three is known, and one in three has no answer that
    it could give.
    """
    text, admitted = unknown(rng)
    if number % 3 == 0:
        return Question(f"Sort: {(digits := ' '.join(map(str, sorted(rng.sample(range(10), 5)))))}", digits)
    if number % 3 == 1:
        return Question(f"Who knows the {text}?", f"code {rng.randint(1000, 9999)}", "contains")
    return Question(f"Who knows the {text}?", admitted, "contains")


class Task(NamedTuple):
    """Questions by their number, how many there are to learn from and to be evaluated by, and the wanted reward.

    Those whose number is a multiple of 3 are known: they are learned from, and nothing is evaluated by them.
    """

    draw: Callable[[random.Random, int], Question]
    questions: int
    held_out: int
    wanted: float


TUNED_ON = "simulations; task admitting, seed 100; number of questions and wanted reward: task sorting, seed 101"

TASKS = {"sorting": Task(sorting, 60, 48, 0.4), "admitting": Task(admitting, 60, 48, 0.3)}


class Client(Teacher):
    """A client that asks the questions of one task."""

    def __init__(self, url: str, task: Task, seed: int):
        super().__init__(url)
        self._random = random.Random(f"asked {seed}")
        self._asked = [task.draw(self._random, number) for number in range(task.questions)]
        self._exam = [task.draw(random.Random(f"held out {n}"), n) for n in range(task.held_out * 3 // 2) if n % 3]
        self._wanted = task.wanted
        self._batches = 0

    async def accuracy(self) -> float:
        """Return the mean reward of the served version on questions that nothing is learned from."""
        found = await asyncio.gather(*(self._answer(q, seed, collect=False) for seed, q in enumerate(self._exam)))
        return statistics.fmean(choice["score"] for choices in found for choice in choices)

    async def batch(self, done: int) -> int:
        """Let the server learn until there were a few more rollouts than `done`; return their number."""
        await self.json("POST", "/v1/training/start")
        if self._batches % AGAIN == 0:
            await self._ask_all()
        self._batches += 1
        now, since = done, perf_counter()
        while now < done + EVERY:
            await asyncio.sleep(POLL_SECONDS)
            before, now = now, rollouts(await self.json("GET", "/v1/training/status"))
            since = perf_counter() if now > before else since
            if perf_counter() > since + IDLE_SECONDS:  # each prompt has been answered as often as it may
                await self._ask_all()
        await self.json("POST", "/v1/training/stop")
        last: dict[str, Any] = {}
        while (status := await self.json("GET", "/v1/training/status")) != last or status["busy"]:
            last = status
            await asyncio.sleep(10 * POLL_SECONDS)
        return rollouts(status)

    async def _ask_all(self) -> None:
        """Ask every question to learn from once, one answer each."""
        await asyncio.gather(*(self._answer(q, self._random.getrandbits(62), collect=True) for q in self._asked))

    async def learned(self, most: int) -> dict[str, Any]:
        """Return the curve until the reward is as wanted or there were `most` rollouts, and the rollouts until then."""
        done, curve = 0, [{"rollouts": 0, "reward": await self.accuracy()}]
        while done < most and curve[-1]["reward"] < self._wanted:
            done = await self.batch(done)
            status = await self.json("GET", "/v1/training/status")
            kept = {name: status.get(name) for name in ("updates", "skipped_groups", "recorded_prompts")}
            curve.append({"rollouts": done, "reward": round(await self.accuracy(), 4)} | kept)
            print(curve[-1], file=sys.stderr, flush=True)
        return {"rollouts": reached(curve, self._wanted), "curve": curve}

    async def _answer(self, asked: Question, seed: int, *, collect: bool) -> list[dict[str, Any]]:
        body = {
            "model": POLICY,
            "messages": [{"role": "user", "content": asked.text}],
            "n": 1 if collect else EACH,
            "max_tokens": 24,
            "temperature": 1.0,
            "seed": seed,
            "collect_trajectory": collect,
            "scoring_function": asked.scoring,
            "metadata": {"answer": asked.answer},
        }
        choices: list[dict[str, Any]] = (await self.json("POST", "/v1/chat/completions", body))["choices"]
        return choices


def rollouts(status: dict[str, Any]) -> int:
    """Return how many answers a server has learned from or looked at."""
    return int(status["trajectories_collected"] + status["siblings_drawn"])


def reached(curve: list[dict[str, Any]], wanted: float) -> float | None:
    """Return the rollouts at which the reward was as wanted, in a line between two evaluations; None: it never was."""
    if curve[-1]["reward"] < wanted or len(curve) < 2:
        return None
    before, after = curve[-2:]
    share = (wanted - before["reward"]) / (after["reward"] - before["reward"])
    return float(round(before["rollouts"] + share * (after["rollouts"] - before["rollouts"])))


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the rollouts of each seed with a curriculum over those without, and the median."""
    by = {(r["run"], r["seed"]): r["rollouts"] for r in found}
    ratios = {
        seed: round(by["variance", seed] / by["uniform", seed], 3)
        for run, seed in by
        if run == "variance" and by["variance", seed] and by.get(("uniform", seed))
    }
    return {"ratios": ratios, "median_ratio": round(statistics.median(ratios.values()), 3) if ratios else None}


def measure(task: Task, name: str, seed: int, most: int) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    training = TRAINING | {"seed": seed, "curriculum": name}
    return run(training, ROOM, lambda url: Client(url, task, seed).learned(most))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="rollouts with a curriculum and without")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--task", choices=TASKS, default="sorting")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--rollouts", type=int, default=8192, help="most answers of a run")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    task = TASKS[args.task]
    about = {"task": args.task, "questions": task.questions, "held_out": task.held_out, "wanted": task.wanted}
    results = Results(args.json_out, settings=TRAINING, **about, tuned_on=TUNED_ON)
    found: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.runs.split(","):
            found.append({"run": name, "seed": seed} | measure(task, name, seed, args.rollouts))
            results.add(results=found)
            print(found[-1], file=sys.stderr, flush=True)
    results.finish(results=found, **summary(found))
    print(summary(found))


if __name__ == "__main__":
    main()
