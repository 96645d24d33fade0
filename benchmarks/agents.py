"""Does an agent learn over HTTP? A task of two turns with a tool, and rewards that come when it is over.

python benchmarks/agents.py --json-out benchmarks/results/agents.json

Turn 1: the built-in model is asked for the score of a city and has to call the tool that knows them. The tool returns
digits, and the user wants them sorted downwards, which the model is bad at. Turn 2: it answers. Both turns are one
trajectory; what the tool and the user say between them has no weight. The reward is 1 when the right tool was called
and the answer is right, and comes as `POST /v1/trajectories/{id}/reward`. In the control, rewards change places within
each batch before they are sent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, POLL_SECONDS, SETTINGS, SKILL, question
from mlx_tandem.cli.http import once

RUNS = ("true", "shuffled")
CITIES = ("Oslo", "Paris", "Rome", "Madrid", "Berlin", "Vienna", "Lisbon", "Athens")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_score",
        "description": "get score",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GROUPS, ANSWERS = 4, 8
EVERY = 10  # updates between two evaluations
EXAM = 32  # episodes of an evaluation
WANTED = 0.8
ROOM = ("--max-model-len", "1024", "--num-blocks", "1025", "--stall-seconds", "600")  # on a busy machine

Message = dict[str, Any]


class Agent:
    """A client that plays episodes of the task, and collects them or not."""

    def __init__(self, url: str, run: str, seed: int):
        self._url, self._run, self._random = url, run, random.Random(seed)
        self.tokens = self.trained = 0

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """Return the body of a reply. Raises RuntimeError for a refusal."""
        status, reply = await once(self._url, method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {reply}")
        return reply

    async def episodes(self, rng: random.Random, count: int, **fields: Any) -> list[tuple[float, str | None]]:
        """Play a task `count` times, and return the rewards, each with its trajectory."""
        digits, wanted = question(rng)
        city = rng.choice(CITIES)
        asked: list[Message] = [{"role": "user", "content": f"What is the score in {city}?"}]
        first = await self._chat(asked, n=count, max_tokens=48, seed=rng.getrandbits(62), **fields)
        rest = (self._rest(asked, choice, city, digits, wanted, rng.getrandbits(62)) for choice in first)
        return list(await asyncio.gather(*rest))

    async def _rest(
        self, asked: list[Message], first: Message, city: str, digits: str, wanted: str, seed: int
    ) -> tuple[float, str | None]:
        said, id = first["message"], first.get("trajectory_id")
        calls = [call["function"] for call in said.get("tool_calls", ())]
        right = [(call["name"], json.loads(call["arguments"])) for call in calls] == [("get_score", {"city": city})]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"] if calls else "none", "content": digits}
        then = [*asked, said, result, {"role": "user", "content": SKILL.format(digits)}]
        more = {} if id is None else {"trajectory_id": id}
        (second,) = await self._chat(then, max_tokens=MAX_TOKENS, seed=seed, **more)
        return float(right and second["message"]["content"] == wanted), id

    async def _chat(self, messages: list[Message], **fields: Any) -> list[Message]:
        body = {"model": POLICY, "messages": messages, "tools": [TOOL], "temperature": 1.0} | fields
        choices: list[Message] = (await self.json("POST", "/v1/chat/completions", body))["choices"]
        return choices

    async def accuracy(self) -> float:
        """Return the share of right episodes of the served version; nothing is learned from them."""
        played = [self.episodes(random.Random(f"exam {i}"), 1) for i in range(EXAM)]
        found = [reward for ((reward, _),) in await asyncio.gather(*played)]
        return sum(found) / len(found)

    async def batch(self, done: int) -> int:
        """Play and reward one batch, and wait for the update that follows; return the number of updates."""
        fields = {"collect_trajectory": True, "scoring_function": "later"}
        tasks = [random.Random(self._random.getrandbits(62)) for _ in range(GROUPS)]
        groups = await asyncio.gather(*(self.episodes(rng, ANSWERS, **fields) for rng in tasks))
        rewards = [reward for group in groups for reward, _ in group]
        if self._run == "shuffled":
            self._random.shuffle(rewards)
        ids = [id for group in groups for _, id in group]
        known = await self.json("GET", f"/v1/trajectories/{ids[0]}")
        self.tokens, self.trained = known["tokens"], known["trained_tokens"]
        await asyncio.gather(
            *(
                self.json("POST", f"/v1/trajectories/{id}/reward", {"reward": reward})
                for id, reward in zip(ids, rewards, strict=True)
            )
        )
        while True:
            status = await self.json("GET", "/v1/training/status")
            if status["updates"] > done or not status["busy"]:
                return int(status["updates"])
            await asyncio.sleep(POLL_SECONDS)


async def learned(agent: Agent, updates: int) -> dict[str, Any]:
    """Return the accuracy after every few updates, and the number of updates after which it was as wanted."""
    done, accuracy = 0, {0: await agent.accuracy()}
    while done < updates:
        goal = min(done + EVERY, updates)
        while done < goal:
            done = await agent.batch(done)
        accuracy[done] = await agent.accuracy()
    status = await agent.json("GET", "/v1/training/status")
    debug = await agent.json("GET", "/debug/training")
    return {
        "accuracy": {str(at): round(share, 4) for at, share in accuracy.items()},
        "updates_to_wanted": next((at for at, share in accuracy.items() if share >= WANTED), None),
        "tokens_of_a_trajectory": agent.tokens,
        "tokens_of_its_answers": agent.trained,
        "rewards": [round(report["mean_reward"], 4) for report in debug["history"]],
        "largest_mismatch_k3": max(report["mismatch_k3"] for report in debug["history"]),
        **{key: status[key] for key in ("updates", "rollbacks", "trajectories_collected", "dropped_no_reward")},
    }


def run(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    with tempfile.TemporaryDirectory(prefix="tandem-agents-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        tree = {
            "rl_training": SETTINGS | {"seed": seed},
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), *ROOM).started(demo.MODEL_PATH) as server:
            found = asyncio.run(learned(Agent(server.url, name, seed), updates))
            return {"run": name, "seed": seed, "device": server.device()} | found


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="learning a task of two turns with a tool over HTTP")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=SETTINGS, wanted=WANTED)
    found: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.runs.split(","):
            found.append(run(name, seed, args.updates))
            results.add(results=found)
            print(found[-1], file=sys.stderr, flush=True)
    results.finish(results=found)


if __name__ == "__main__":
    main()
