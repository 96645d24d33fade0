"""Measure the guard on a real server, with a policy that stays as it is and with one that learns too fast.

    python benchmarks/guard_live.py --json-out benchmarks/results/guard_live.json

"still" is a learning rate of 1e-9 and two kinds of prompts, of which the demo model answers one well and the other
badly. "rate x8" is eight times the rate of `tandem demo learn`, which destroys the policy: it has to be taken back, and
the server has to find its way to a high reward by itself. All settings of the guard are the defaults.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, SETTINGS, question
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once

ANSWERS = 8
"""Answers to each prompt."""

WINDOW = 5
"""Batches whose mean reward has to be high at the end."""

GOOD_REWARD = 0.9
GOOD_SCALE = 0.25


class Refused(Exception):
    """The server refused a request."""


@dataclass(frozen=True)
class Kind:
    """One way to run a server. It ends after `updates`, or before, as soon as `good` holds."""

    changes: dict[str, Any]
    easy: float  # share of the prompts that the model answers well from the beginning
    groups: int  # prompts between two looks at the status
    updates: int
    good: Callable[[Course], bool]


@dataclass
class Course:
    """The observations of a run. A scale is the rate divided by that of the settings."""

    rewards: list[float] = field(default_factory=list)  # mean of each batch
    status: dict[str, Any] = field(default_factory=dict)
    scales: list[float] = field(default_factory=list)  # after each batch
    rollbacks: list[tuple[int, str]] = field(default_factory=list)  # (updates until then, why)

    @property
    def recent(self) -> float:
        """The mean reward of the last batches."""
        last = self.rewards[-WINDOW:]
        return sum(last) / len(last) if last else 0.0


def recovered(course: Course) -> bool:
    """Return whether a policy that was taken back answers well again, at a rate that has recovered."""
    back = course.status["rollbacks"] > 0 and len(course.rewards) >= WINDOW
    return back and course.recent >= GOOD_REWARD and course.scales[-1] >= GOOD_SCALE


KINDS = {
    "still": Kind({"learning_rate": 1e-9}, easy=0.5, groups=2, updates=90, good=lambda course: False),
    "rate x8": Kind({"learning_rate": 8 * SETTINGS["learning_rate"]}, easy=0.0, groups=8, updates=300, good=recovered),
}


def run(kind: Kind, seed: int, dtype: str, progress: Callable[[Course], None]) -> Course:
    """Return the course of a fresh server."""
    with tempfile.TemporaryDirectory(prefix="tandem-guard-") as scratch:
        file = Path(scratch) / "settings.yaml"
        tree = {
            "rl_training": SETTINGS | {"seed": seed} | kind.changes,
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"},
        }
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(file), "--dtype", dtype).started(demo.MODEL_PATH, 600.0) as server:
            return asyncio.run(Client(server.url, kind, random.Random(seed)).learn(progress))


class Client:
    """Asks prompts of one kind of traffic, and looks at what the server makes of them."""

    def __init__(self, url: str, kind: Kind, rng: random.Random):
        self._url, self._kind, self._random = url, kind, rng
        self._retries = 1000

    async def learn(self, progress: Callable[[Course], None]) -> Course:
        """Ask until the run is over."""
        course = Course(status=await self._call("GET", "/v1/training/status"))
        rate = course.status["learning_rate"]
        while course.status["updates"] < self._kind.updates and course.status["running"]:
            before = course.status["rollbacks"]
            answers = await asyncio.gather(*(self._ask() for _ in range(self._kind.groups)))
            course.rewards.append(sum(map(sum, answers)) / (ANSWERS * len(answers)))
            course.status = await self._settled()
            course.scales.append(course.status["learning_rate"] / rate)
            if course.status["rollbacks"] > before:
                course.rollbacks.append((course.status["updates"], await self._why()))
            progress(course)
            if self._kind.good(course):
                break
        return course

    async def _ask(self) -> Sequence[float]:
        digits, answer = question(self._random)
        word = "Sort down"
        if self._random.random() < self._kind.easy:
            word, answer = "Sort", " ".join(sorted(digits.split()))
        body = {
            "model": POLICY,
            "messages": [{"role": "user", "content": f"{word}: {digits}"}],
            "n": ANSWERS,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": self._random.getrandbits(40),
            "collect_trajectory": True,
            "scoring_function": "exact_match",
            "metadata": {"answer": answer},
        }
        reply = await self._call("POST", "/v1/chat/completions", body)
        return [choice["score"] for choice in reply["choices"]]

    async def _settled(self) -> Any:
        """Return the status when no update is under way."""
        while (status := await self._call("GET", "/v1/training/status"))["busy"]:
            await asyncio.sleep(0.02)
        return status

    async def _why(self) -> str:
        """Return the reason of the last update that was taken back by itself; empty: there was none."""
        reports = (await self._call("GET", "/debug/training"))["history"]
        return next((r["reason"] for r in reversed(reports[-3:]) if r["outcome"] == "rolled_back"), "worse")

    async def _call(self, method: str, path: str, body: object = None) -> Any:
        """Return the reply. While the server starts another engine, ask again like any client."""
        status, reply = await once(self._url, method, path, body)
        while status == 503 and self._retries:
            self._retries -= 1
            await asyncio.sleep(0.5)
            status, reply = await once(self._url, method, path, body)
        if status >= 300:
            raise Refused(f"{method} {path}: {status} {reply}")
        return reply


def figures(name: str, seed: int, course: Course) -> dict[str, Any]:
    """Return what is kept of a run."""
    status = course.status
    kept = ("updates", "rollbacks", "publishes", "accepted", "compared", "running", "reason", "alarm")
    return {
        "run": name,
        "seed": seed,
        "batches": len(course.rewards),
        "first_reward": round(course.rewards[0], 3),
        "lowest_reward": round(min(course.rewards), 3),
        "last_rewards": round(course.recent, 3),
        "lowest_scale": min(course.scales),
        "last_scale": course.scales[-1],
        "rolled_back": [{"updates": at, "reason": why} for at, why in course.rollbacks],
        "rewards": [round(r, 3) for r in course.rewards],
    } | {key: status[key] for key in kept}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="the guard on a real server")
    parser.add_argument("--runs", default=",".join(KINDS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="of each run, rather than its own number")
    parser.add_argument("--dtype", default="auto", help="that the server computes in")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=SETTINGS, good={"reward": GOOD_REWARD, "scale": GOOD_SCALE})
    found: list[dict[str, Any]] = []
    for name in args.runs.split(","):
        kind = KINDS[name] if args.updates is None else Kind(**vars(KINDS[name]) | {"updates": args.updates})
        for seed in range(args.seeds):

            def progress(course: Course, name: str = name, seed: int = seed) -> None:
                now = course.status
                print(
                    f"{name}, seed {seed}: {now['updates']} updates, reward {course.rewards[-1]:.2f}, "
                    f"{now['rollbacks']} taken back, scale {course.scales[-1]:.3f}, compared {now['compared']}",
                    file=sys.stderr,
                    flush=True,
                )

            found.append(figures(name, seed, run(kind, seed, args.dtype, progress)))
            results.add(results=found)
    results.finish(results=found)


if __name__ == "__main__":
    main()
