"""A client that teaches the built-in model its weak skill over HTTP: questions, rewards, and their curve.

It uses nothing of the server but its API: prompts go to `/v1/completions` with `collect_trajectory` and a
`scoring_function`, and the server does the rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from mlx_tandem.http_client import once

SKILL = "Sort down: {}"
"""Question that the base model answers wrongly."""

POLICY = "policy"
"""Name of the adapter that is trained."""

MAX_TOKENS = 24
"""Most tokens of an answer."""

POLL_SECONDS = 0.02
"""Seconds between two requests for the status."""

Rewards = Literal["true", "shuffled"]
"""Whether a batch is taught with its true rewards, or with shuffled ones, which teach nothing."""

SETTINGS: dict[str, Any] = {
    "enabled": True,
    "adapter": POLICY,
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "learning_rate": 1e-3,
    "update_frequency": 32,
    "trajectory_buffer_size": 512,
    "algorithm": "grpo",
}
"""Section `rl_training` of the settings of a server that this client teaches."""


Question = tuple[str, str]
"""Digits, and the same digits in the right order."""


def question(rng: random.Random) -> Question:
    """Return a random question with its answer."""
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
    return " ".join(map(str, digits)), " ".join(map(str, sorted(digits, reverse=True)))


@dataclass(frozen=True)
class Task:
    """The questions that a client asks, and how their answers are scored."""

    form: str  # of a question; the first part of what `draw` returns is put into it
    draw: Callable[[random.Random], Question]
    scoring: str
    max_tokens: int = MAX_TOKENS


SORTING = Task(SKILL, question, "exact_match")
"""The weak skill of the built-in model."""


class TeachingError(Exception):
    """The server refused a request; the message says which."""


@dataclass
class Step:
    """One batch of completions and the update that followed."""

    reward: float  # mean
    seconds: float  # since the start
    version: int  # of the policy that answered


@dataclass
class Curve:
    """The batches of one run."""

    steps: list[Step] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """The mean reward of each batch."""
        return [step.reward for step in self.steps]

    def first(self, count: int = 5) -> float:
        """Return the mean reward of the first `count` batches."""
        return _mean(self.rewards[:count])

    def last(self, count: int = 5) -> float:
        """Return the mean reward of the last `count` batches."""
        return _mean(self.rewards[-count:])


class Learner:
    """A client that asks `groups` questions per batch, each answered `answers` times."""

    def __init__(
        self,
        url: str,
        *,
        seed: int,
        groups: int = 8,
        answers: int = 8,
        rewards: Rewards = "true",
        task: Task = SORTING,
    ):
        self._url = url
        self._task = task
        self._random = random.Random(seed)
        self._groups = groups
        self._answers = answers
        self._rewards = rewards
        self.curve = Curve()
        self._began = perf_counter()

    async def learn(self, steps: int, on_step: Callable[[Curve], None] = lambda curve: None) -> Curve:
        """Run `steps` batches, each after the update that the one before led to; return their curve."""
        done = await self._updates()
        for _ in range(steps):
            answers = await asyncio.gather(*(self._collect() for _ in range(self._groups)))
            await self._teach(answers)
            scores = [answer["score"] for group in answers for answer in group]
            versions = [v for group in answers for answer in group for v in answer["versions"]]
            self.curve.steps.append(Step(_mean(scores), perf_counter() - self._began, max(versions, default=0)))
            on_step(self.curve)
            done = await self._wait_for_update(done)
        return self.curve

    async def _collect(self) -> list[dict[str, Any]]:
        collect, seed = self._rewards == "true", self._random.getrandbits(62)
        return await self._ask(*self._task.draw(self._random), answers=self._answers, seed=seed, collect=collect)

    async def accuracy(self, questions: Sequence[Question]) -> float:
        """Return the share of right answers of the served policy, sampled with fixed seeds; nothing is learned from
        them.
        """
        asked = (self._ask(*q, answers=4, seed=i, collect=False) for i, q in enumerate(questions))
        return _mean([answer["score"] for group in await asyncio.gather(*asked) for answer in group])

    async def status(self) -> Any:
        """Return the server's status of training."""
        return (await self._json("GET", "/v1/training/status"))[1]

    async def _ask(
        self, asked: str, answer: str, *, answers: int, seed: int, collect: bool, scoring: str = ""
    ) -> list[dict[str, Any]]:
        """Return one question's choices as the server returned them; without `scoring`, scored as the task says."""
        _, prompt = await self._json(
            "POST", "/tokenize", {"messages": [{"role": "user", "content": self._task.form.format(asked)}]}
        )
        body = {
            "model": POLICY,
            "prompt": prompt["tokens"],
            "n": answers,
            "max_tokens": self._task.max_tokens,
            "temperature": 1.0,
            "seed": seed,
            "scoring_function": scoring or self._task.scoring,
            "metadata": {"answer": answer},
            "return_token_ids": True,
            "collect_trajectory": collect,
        }
        _, reply = await self._json("POST", "/v1/completions", body)
        return [choice | {"prompt": prompt["tokens"]} for choice in reply["choices"]]

    async def _teach(self, answers: Sequence[list[dict[str, Any]]]) -> None:
        """Have a batch learned from that was not collected with its rewards."""
        if self._rewards == "true":
            return
        scores = [answer["score"] for group in answers for answer in group]
        self._random.shuffle(scores)
        trajectories = []
        for g, group in enumerate(answers):
            name = f"shuffled-{self._random.getrandbits(62)}-{g}"
            for answer in group:
                trajectories.append(
                    {
                        "prompt_token_ids": answer["prompt"],
                        "token_ids": answer["token_ids"],
                        "reward": scores.pop(),
                        "group": name,
                    }
                )
        await self._json("POST", "/v1/training/update", {"trajectories": trajectories, "wait": True})

    async def _updates(self) -> int:
        return int((await self.status())["updates"])

    async def _wait_for_update(self, done: int) -> int:
        """Wait for the next update and return the number of updates.

        A batch in which all answers of each group have equal rewards leads to no update, and then nothing is waited
        for.
        """
        while True:
            status = await self.status()
            if status["updates"] > done or not status["busy"]:
                return int(status["updates"])
            await asyncio.sleep(POLL_SECONDS)

    async def _json(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        status, reply = await once(self._url, method, path, body)
        if status >= 300:
            raise TeachingError(f"{method} {path}: {status} {reply}")
        return status, reply


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
