"""Does a reward model that has learned from preferences teach? The built-in model's weak skill, sorting downwards.

python benchmarks/reward_model.py --json-out benchmarks/results/reward_model.json

For each seed: the model's own answers to questions are drawn, and each right one is preferred to each wrong one to the
same question. `tandem train reward` learns from these pairs. A server then has the result as its only scoring function,
`reward_model`, and a client asks other questions, whose answers are collected: nothing but the reward model's scores is
learned from. Its accuracy is the share of pairs of further questions that it ranks right over HTTP (`POST /pooling`).
The true reward is the share of right answers of the served policy to questions that nothing is learned from.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from taught import Teacher, main, run

from mlx_tandem import Engine
from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, SETTINGS, SKILL, Learner, Question, question

RUNS = ("reward_model",)
TASTE = "taste"
OPTIONS = ("--rank", "8", "--learning-rate", "1e-3", "--epochs", "2")
"""Options of `tandem train reward`."""

TRAINING = SETTINGS | {"siblings": 0}
SCORING = [{"function": "reward_model", "options": {"model": TASTE}}]
ASKED, ANSWERS = 8, 8  # questions of a batch, and answers to each
DRAWN = 8  # answers that are drawn to each question for pairs
LEARNED, HELD = 160, 200  # pairs
EXAM = [question(random.Random(f"asked {i}")) for i in range(32)]
ROOM = ("--max-model-len", "1024", "--num-blocks", "1025", "--stall-seconds", "600")  # on a busy machine

Pair = dict[str, str]
"""A line of the file of preferences."""


def drawn_pairs(rng: random.Random, count: int, without: set[str]) -> Iterator[Pair]:
    """Yield preferences among the model's own answers to questions that are not in `without`, which grows by them."""
    without |= {digits for digits, _ in EXAM}
    with Engine(max_num_seqs=32, max_model_len=1024, num_blocks=513) as engine:
        found = 0
        while found < count:
            asked = [question(rng) for _ in range(32)]
            asked = [each for each in dict(asked).items() if each[0] not in without]
            without |= {digits for digits, _ in asked}
            prompts = [engine.codec.chat([{"role": "user", "content": SKILL.format(d)}], asks=True) for d, _ in asked]
            said = engine.generate(prompts, n=DRAWN, temperature=1.0, max_tokens=MAX_TOKENS, seed=rng.getrandbits(62))
            for i, each in enumerate(asked):
                for pair in compared(each, {answer.text for answer in said[i * DRAWN : (i + 1) * DRAWN]}):
                    if found < count:
                        found += 1
                        yield pair


def compared(asked: Question, said: set[str]) -> Iterator[Pair]:
    """Yield the right answer to a question, if it was given, beside each wrong one."""
    digits, right = asked
    for wrong in sorted(said - {right}) if right in said else ():
        yield {"prompt": SKILL.format(digits), "chosen": right, "rejected": wrong}


class Client(Teacher):
    """A client whose answers are scored by the reward model alone."""

    def __init__(self, url: str, seed: int):
        super().__init__(url)
        self._random = random.Random(f"learn {seed}")
        self._exam = Learner(url, seed=seed)

    async def accuracy(self) -> float:
        """Return the share of right answers of the served policy: its true reward."""
        return await self._exam.accuracy(EXAM)

    async def ranked(self, pairs: list[Pair]) -> float:
        """Return the share of pairs whose chosen answer has the higher score."""

        async def score(pair: Pair, side: str) -> float:
            said = [{"role": "user", "content": pair["prompt"]}, {"role": "assistant", "content": pair[side]}]
            reply = await self.json("POST", "/pooling", {"model": TASTE, "messages": said})
            return float(reply["data"][0]["data"][0])

        right = 0
        for pair in pairs:
            right += await score(pair, "chosen") > await score(pair, "rejected")
        return right / len(pairs)

    async def batch(self, done: int) -> int:
        """Ask one batch, and wait for the update that follows; return the number of updates."""
        await asyncio.gather(*(self._ask(question(self._random)[0]) for _ in range(ASKED)))
        return await self.updated(done)

    async def _ask(self, digits: str) -> None:
        body = {
            "model": POLICY,
            "messages": [{"role": "user", "content": SKILL.format(digits)}],
            "n": ANSWERS,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": self._random.getrandbits(62),
            "collect_trajectory": True,
            "scoring_function": SCORING,
        }
        await self.json("POST", "/v1/chat/completions", body)


async def learned(client: Client, updates: int, held: list[Pair]) -> dict[str, Any]:
    """Return how well the reward model ranks, and the curve of the policy that learns from it."""
    ranked = await client.ranked(held)
    curve = await client.curve(updates)
    status = await client.json("GET", "/v1/training/status")
    true = list(curve["accuracy"].values())
    kept = ("updates", "rollbacks", "trajectories_collected", "skipped_groups")
    return {"held_out_accuracy": ranked, "true_reward": [true[0], true[-1]]} | curve | {k: status[k] for k in kept}


def measure(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the figures of one seed."""
    rng, asked = random.Random(f"pairs {seed}"), set[str]()
    learn = [*drawn_pairs(rng, LEARNED, asked)]
    held = [*drawn_pairs(rng, HELD, asked)]
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as scratch:
        data, out = Path(scratch) / "pairs.jsonl", Path(scratch) / TASTE
        data.write_text("".join(json.dumps(pair) + "\n" for pair in learn), encoding="utf-8")
        command = [sys.executable, "-m", "mlx_tandem", "train", "reward", str(data), "--adapter-out", str(out)]
        subprocess.run([*command, *OPTIONS, "--seed", str(seed)], check=True)
        room = (*ROOM, "--adapter", TASTE, str(out))
        return run(TRAINING | {"seed": seed}, room, lambda url: learned(Client(url, seed), updates, held))


if __name__ == "__main__":
    main("reward models from preferences, and learning from them", RUNS, TRAINING, measure)
