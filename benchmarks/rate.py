"""Does a server learn without being told a learning rate? Three tasks over HTTP, and a control.

    python benchmarks/rate.py --json-out benchmarks/results/rate.json

Each run is a fresh `tandem serve --enable-rl-training` with nothing but defaults, and a client whose answers are
collected and scored. The tasks: the weak skill of the built-in model; to admit what it does not know; and to decline
small talk with one of its three sentences. The control learns the first task from rewards that changed places within
each batch, each posted for its trajectory. The constants of `training/online/rates.py` were chosen with the first two
tasks and other seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from partial import Results, stop_cleanly
from servers import Running, tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import SORTING, Curve, Learner, Question, Task
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once
from recipes.demo_model import talk

WINDOW = 5
"""Batches whose mean reward is compared."""

LEARNED = 0.85
"""The mean reward that is to be reached."""

NUMBERS = ("mean_reward", "kl", "learning_rate", "agreement", "outcome")
"""Numbers of each update that are kept."""


THINGS = "weather price colour name age size taste king owner smell length shape weight story end".split()
OWNERS = "Spain|the moon|my dog|a train|the sea|bread|this town|winter|the wind|a book|Rome|music|snow|the door|a cup"


def unknown(rng: random.Random) -> Question:
    """Return something that the model cannot know, and what it says when it admits that."""
    return f"{rng.choice(THINGS)} of {rng.choice(OWNERS.split('|'))}", "only a tiny demo model"


def small_talk(rng: random.Random) -> Question:
    """Return a sentence that the model has no skill for, and the way in which it is to decline."""
    return talk.small_talk(rng), "I have no answer to that"


class Shuffled(Learner):
    """A client whose rewards come later, after they changed places among all answers of their batch."""

    async def _collect(self) -> list[dict[str, Any]]:
        asked = self._task.draw(self._random)
        seed = self._random.getrandbits(62)
        choices = await self._ask(*asked, answers=self._answers, seed=seed, collect=True, scoring="later")
        return [choice | {"score": float(choice["text"].strip() == asked[1])} for choice in choices]

    async def _teach(self, answers: Sequence[list[dict[str, Any]]]) -> None:
        scores = [choice["score"] for group in answers for choice in group]
        self._random.shuffle(scores)
        posts = []
        for choice in (choice for group in answers for choice in group):
            path = f"/v1/trajectories/{choice['trajectory_id']}/reward"
            posts.append(self._json("POST", path, {"reward": scores.pop()}))
        await asyncio.gather(*posts)


RUNS: dict[str, Callable[[str, int], Learner]] = {
    "sort down": lambda url, seed: Learner(url, seed=seed, task=SORTING),
    "admit": lambda url, seed: Learner(url, seed=seed, task=Task("Who knows the {}?", unknown, "contains")),
    "decline": lambda url, seed: Learner(url, seed=seed, task=Task("{}", small_talk, "contains")),
    "shuffled": lambda url, seed: Shuffled(url, seed=seed, task=SORTING),
}
"""The client of each run, by its name."""

Progress = Callable[[dict[str, Any]], None]


def learned(name: str, seed: int, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    with tempfile.TemporaryDirectory(prefix="tandem-rate-") as scratch:
        options = ("--enable-rl-training", "--checkpoint-dir", f"{scratch}/checkpoints")
        with tandem(*options, "--dtype", args.dtype).started(demo.MODEL_PATH) as server:
            about = {"run": name, "seed": seed, "device": server.device()}
            return asyncio.run(_run(about, server, RUNS[name](server.url, seed), args.steps, progress))


async def _run(
    about: dict[str, Any], server: Running, learner: Learner, steps: int, progress: Progress
) -> dict[str, Any]:
    def shown(curve: Curve) -> None:
        if len(curve.steps) % WINDOW == 0:
            progress(about | _found(curve))

    await learner.learn(steps, shown)
    _, history = await once(server.url, "GET", "/v1/training/history")
    status = await learner.status()
    kept = {key: status[key] for key in ("updates", "rollbacks", "gain", "advice")}
    return about | _found(learner.curve) | kept | {"history": [{n: u[n] for n in NUMBERS} for u in history["updates"]]}


def _found(curve: Curve) -> dict[str, Any]:
    means = [sum(curve.rewards[i : i + WINDOW]) / WINDOW for i in range(len(curve.rewards) - WINDOW + 1)]
    return {
        "steps": len(curve.steps),
        "first_five": curve.first(WINDOW),
        "last_five": curve.last(WINDOW),
        "learned_after": next((i + WINDOW for i, mean in enumerate(means) if mean >= LEARNED), None),
        "seconds": curve.steps[-1].seconds,
        "rewards": curve.rewards,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="learning over HTTP with the default settings")
    parser.add_argument("--seeds", default="20,21,22")
    parser.add_argument("--steps", type=int, default=40, help="batches of 64 answers")
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--dtype", default="auto", help="that the server computes in")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, window=WINDOW, learned=LEARNED)
    finished: list[dict[str, Any]] = []

    def progress(run: dict[str, Any]) -> None:
        results.add(results=[*finished, run])
        print(_line(run), file=sys.stderr, flush=True)

    for name in args.runs.split(","):
        for seed in map(int, args.seeds.split(",")):
            finished.append(learned(name, seed, args, progress))
    results.finish(results=finished)
    print("\n".join(map(_line, finished)))


def _line(run: dict[str, Any]) -> str:
    said = f"{run['run']}, seed {run['seed']}: {run['steps']} batches in {run['seconds']:.0f} s, "
    return said + f"reward {run['first_five']:.2f} -> {run['last_five']:.2f}"


if __name__ == "__main__":
    main()
