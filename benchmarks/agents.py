"""Does an agent learn over HTTP? A task of two turns with a tool, and rewards that come when it is over.

python benchmarks/agents.py --json-out benchmarks/results/agents.json

Turn 1: the built-in model is asked for the score of a city and has to call the tool that knows them. The tool returns
digits, and the user wants them sorted downwards, which the model is bad at. Turn 2: it answers. Both turns are one
trajectory; what the tool and the user say between them has no weight. The reward is 1 when the right tool was called
and the answer is right, and comes as `POST /v1/trajectories/{id}/reward`. In the control, rewards change places within
each batch before they are sent.
"""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from taught import Teacher, main, run

from mlx_tandem.cli.demo.learner import MAX_TOKENS, POLICY, SETTINGS, SKILL, question

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
EXAM = 32  # episodes of an evaluation
ROOM = ("--max-model-len", "1024", "--num-blocks", "1025", "--stall-seconds", "600")  # on a busy machine

Message = dict[str, Any]


class Agent(Teacher):
    """A client that plays episodes of the task, and collects them or not."""

    def __init__(self, url: str, run: str, seed: int):
        super().__init__(url)
        self._run, self._random = run, random.Random(seed)
        self.tokens = self.trained = 0

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
        return await self.updated(done)


async def learned(agent: Agent, updates: int) -> dict[str, Any]:
    """Return the curve of an agent, and what the server says of its learning."""
    curve = await agent.curve(updates)
    status = await agent.json("GET", "/v1/training/status")
    debug = await agent.json("GET", "/debug/training")
    return curve | {
        "tokens_of_a_trajectory": agent.tokens,
        "tokens_of_its_answers": agent.trained,
        "rewards": [round(report["mean_reward"], 4) for report in debug["history"]],
        "largest_mismatch_k3": max(report["mismatch_k3"] for report in debug["history"]),
        **{key: status[key] for key in ("updates", "rollbacks", "trajectories_collected", "dropped_no_reward")},
    }


def measure(name: str, seed: int, updates: int) -> dict[str, Any]:
    """Return the figures of one run on a fresh server."""
    return run(SETTINGS | {"seed": seed}, ROOM, lambda url: learned(Agent(url, name, seed), updates))


if __name__ == "__main__":
    main("learning a task of two turns with a tool over HTTP", RUNS, SETTINGS, measure)
