"""Does it learn from traffic as it comes, one answer to each prompt? The built-in model's weak skill, and a control.

python benchmarks/alone.py --json-out benchmarks/results/alone.json

A client asks 32 different questions at a time, each once, and no siblings are drawn (`siblings: 0`): answers are
compared across prompts. Runs: "scored" by the server's function; "sent" later by the client, as
`POST /v1/trajectories/{id}/reward`; "shuffled", sent as well, after the rewards of a batch have changed places, from
which nothing must be learned. Every few updates the served version is asked 16 other questions, each four times.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, POLL_SECONDS, SETTINGS, SKILL, Learner, question
from mlx_tandem.cli.http import once

RUNS = ("scored", "sent", "shuffled")
BATCH = SETTINGS["update_frequency"]
EVERY = 10  # updates between two evaluations
WANTED = 0.8
QUESTIONS = [question(random.Random(f"asked {i}")) for i in range(16)]
ROOM = ("--max-model-len", "1024", "--num-blocks", "513", "--stall-seconds", "600")  # on a busy machine


class Client:
    """A client that asks each question once and sees to the rewards."""

    def __init__(self, url: str, run: str, seed: int):
        self._url, self._run, self._random = url, run, random.Random(seed)
        self._exam = Learner(url, seed=seed)

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """Return the body of a reply. Raises RuntimeError for a refusal."""
        status, reply = await once(self._url, method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {reply}")
        return reply

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
        while True:
            status = await self.json("GET", "/v1/training/status")
            if status["updates"] > done or not status["busy"]:
                return int(status["updates"])
            await asyncio.sleep(POLL_SECONDS)

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
    """Return the accuracy after every few updates, and the number of updates after which it was as wanted."""
    done, accuracy = 0, {0: await client.accuracy()}
    while done < updates:
        goal = min(done + EVERY, updates)
        while done < goal:
            done = await client.batch(done)
        accuracy[done] = await client.accuracy()
    status = await client.json("GET", "/v1/training/status")
    reached = next((at for at, share in accuracy.items() if share >= WANTED), None)
    return {
        "accuracy": {str(at): round(share, 4) for at, share in accuracy.items()},
        "updates_to_wanted": reached,
        **{key: status[key] for key in ("updates", "rollbacks", "trajectories_collected", "skipped_groups")},
    }


def run(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    with tempfile.TemporaryDirectory(prefix="tandem-alone-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        training = SETTINGS | {"seed": seed, "siblings": 0}
        tree = {"rl_training": training, "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"}}
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), *ROOM).started(demo.MODEL_PATH) as server:
            found = asyncio.run(learned(Client(server.url, name, seed), updates))
            return {"run": name, "seed": seed, "device": server.device()} | found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="learning from single answers to different prompts")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=SETTINGS | {"siblings": 0}, wanted=WANTED)
    found: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.runs.split(","):
            found.append(run(name, seed, args.updates))
            results.add(results=found)
            print(found[-1], file=sys.stderr, flush=True)
    results.finish(results=found)


if __name__ == "__main__":
    main()
