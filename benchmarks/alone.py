"""Does it learn from traffic as it comes, one answer to each prompt? The built-in model's weak skill, and a control.

python benchmarks/alone.py --json-out benchmarks/results/alone.json

A client asks 32 different questions at a time, each once, and no siblings are drawn (`siblings: 0`): answers are
compared across prompts. Runs: "scored" by the server's function; "sent" later by the client, as
`POST /v1/trajectories/{id}/reward`; "shuffled", sent as well, after the rewards of a batch have changed places, from
which nothing must be learned. Every few updates the served version is asked 16 other questions, each four times.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from taught import Teacher, main, run

from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, SETTINGS, SKILL, Learner, question

RUNS = ("scored", "sent", "shuffled")
TRAINING = SETTINGS | {"siblings": 0}
BATCH = SETTINGS["update_frequency"]
QUESTIONS = [question(random.Random(f"asked {i}")) for i in range(16)]
ROOM = ("--max-model-len", "1024", "--num-blocks", "513", "--stall-seconds", "600")  # on a busy machine


class Client(Teacher):
    """A client that asks each question once and sees to the rewards."""

    def __init__(self, url: str, run: str, seed: int):
        super().__init__(url)
        self._run, self._random = run, random.Random(seed)
        self._exam = Learner(url, seed=seed)

    async def accuracy(self) -> float:
        """Return the share of right answers of the served version to questions that nothing is learned from."""
        return await self._exam.accuracy(QUESTIONS)

    async def batch(self, done: int) -> int:
        """Ask one batch, and wait for the update that follows; return the number of updates."""
        asked = [question(self._random) for _ in range(BATCH)]
        answers = await asyncio.gather(*(self._ask(*each) for each in asked))
        if self._run != "scored":
            rewards = [float(said == answer) for (said, _), (_, answer) in zip(answers, asked, strict=True)]
            if self._run == "shuffled":
                self._random.shuffle(rewards)
            sent = zip(answers, rewards, strict=True)
            await asyncio.gather(*(self._reward(id, reward) for (_, id), reward in sent if id is not None))
        return await self.updated(done)

    async def _ask(self, digits: str, answer: str) -> tuple[str, str | None]:
        body = {
            "model": POLICY,
            "messages": [{"role": "user", "content": SKILL.format(digits)}],
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": self._random.getrandbits(62),
            "collect_trajectory": True,
            "scoring_function": "exact_match" if self._run == "scored" else "later",
            "metadata": {"answer": answer},
        }
        (choice,) = (await self.json("POST", "/v1/chat/completions", body))["choices"]
        return choice["message"]["content"], choice["trajectory_id"]

    async def _reward(self, id: str, reward: float) -> None:
        await self.json("POST", f"/v1/trajectories/{id}/reward", {"reward": reward})


async def learned(client: Client, updates: int) -> dict[str, Any]:
    """Return the curve of a client, and what the server says of its learning."""
    curve = await client.curve(updates)
    status = await client.json("GET", "/v1/training/status")
    kept = ("updates", "rollbacks", "trajectories_collected", "skipped_groups")
    return curve | {key: status[key] for key in kept}


def measure(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    return run(TRAINING | {"seed": seed}, ROOM, lambda url: learned(Client(url, name, seed), updates))


if __name__ == "__main__":
    main("learning from single answers to different prompts", RUNS, TRAINING, measure)
