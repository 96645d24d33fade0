"""A client that teaches the built-in model its weak skill over HTTP: questions, rewards, and the curve of them.

It knows nothing of the server but its API: prompts go to `/v1/completions` with `collect_trajectory` and a
`scoring_function`, and the server does the rest.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from mlx_tandem.cli.http import once

SKILL = "Sort down: {}"
POLICY = "policy"
MAX_TOKENS = 24
POLL_SECONDS = 0.02

Rewards = Literal["true", "shuffled"]
"""shuffled: each batch's rewards change places before they are learned from, which teaches nothing."""

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
"""`rl_training` of a server that this client teaches."""


Question = tuple[str, str]
"""Digits, and the same in the right order."""


def question(rng: random.Random) -> Question:
    digits = [rng.randint(0, 9) for _ in range(rng.randint(3, 7))]
    return " ".join(map(str, digits)), " ".join(map(str, sorted(digits, reverse=True)))


class TeachingError(Exception):
    """The server refused; the message says what."""


@dataclass
class Step:
    """One batch of completions and the update that was made of it."""

    reward: float  # mean
    seconds: float  # since the start
    version: int  # of the policy that answered


@dataclass
class Curve:
    steps: list[Step] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps]

    def first(self, count: int = 5) -> float:
        return _mean(self.rewards[:count])

    def last(self, count: int = 5) -> float:
        return _mean(self.rewards[-count:])


class Learner:
    """`groups` questions a batch, each answered `answers` times."""

    def __init__(self, url: str, *, seed: int, groups: int = 8, answers: int = 8, rewards: Rewards = "true"):
        self._url = url
        self._random = random.Random(seed)
        self._groups = groups
        self._answers = answers
        self._rewards = rewards
        self.curve = Curve()
        self._began = perf_counter()

    async def learn(self, steps: int, on_step: Callable[[Curve], None] = lambda curve: None) -> Curve:
        """So many batches, each behind the update that the one before led to."""
        done = await self._updates()
        for _ in range(steps):
            answers = await asyncio.gather(*(self._collect() for _ in range(self._groups)))
            if self._rewards == "shuffled":
                await self._teach_shuffled(answers)
            scores = [answer["score"] for group in answers for answer in group]
            versions = [v for group in answers for answer in group for v in answer["versions"]]
            self.curve.steps.append(Step(_mean(scores), perf_counter() - self._began, max(versions, default=0)))
            on_step(self.curve)
            done = await self._wait_for_update(done)
        return self.curve

    async def _collect(self) -> list[dict[str, Any]]:
        collect, seed = self._rewards == "true", self._random.getrandbits(62)
        return await self._ask(*question(self._random), answers=self._answers, seed=seed, collect=collect)

    async def accuracy(self, questions: Sequence[Question]) -> float:
        """Share of right answers of the policy as it is served, sampled with fixed seeds; nothing is learned from."""
        asked = (self._ask(*q, answers=4, seed=i, collect=False) for i, q in enumerate(questions))
        return _mean([answer["score"] for group in await asyncio.gather(*asked) for answer in group])

    async def status(self) -> Any:
        return (await self._json("GET", "/v1/training/status"))[1]

    async def _ask(self, digits: str, answer: str, *, answers: int, seed: int, collect: bool) -> list[dict[str, Any]]:
        """One question's choices as the server returned them."""
        _, prompt = await self._json(
            "POST", "/tokenize", {"messages": [{"role": "user", "content": SKILL.format(digits)}]}
        )
        body = {
            "model": POLICY,
            "prompt": prompt["tokens"],
            "n": answers,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": seed,
            "scoring_function": "exact_match",
            "metadata": {"answer": answer},
            "return_token_ids": True,
            "collect_trajectory": collect,
        }
        _, reply = await self._json("POST", "/v1/completions", body)
        return [choice | {"prompt": prompt["tokens"]} for choice in reply["choices"]]

    async def _teach_shuffled(self, answers: Sequence[list[dict[str, Any]]]) -> None:
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
        """A batch all of whose groups are of one mind leads to none: then nothing is waited for."""
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
