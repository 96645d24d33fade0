"""An environment of verifiers, and a run of it by the client that trainers use.

python sorting_verifiers.py URL MODEL TOKENIZER TASKS ROLLOUTS   prints each rollout as a trajectory in JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable

import sorting_data
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import SamplingConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


class Data(vf.TaskData):
    answer: str


class Sorting(vf.Task[Data]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return sorting_data.score(trace.last_reply or "", self.data.answer)


class SortingTaskset(vf.Taskset[Sorting]):
    def load(self) -> Iterable[Sorting]:
        return [Sorting(Data(prompt=question, answer=answer), self.config.task) for question, answer in
                sorting_data.rows()]  # fmt: skip


class OneTurn(vf.Harness[vf.HarnessConfig]):
    """Asks once, without a program of its own."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            messages = [{"role": "user", "content": data.prompt}]
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["OneTurn", "SortingTaskset"]


def trajectory(trace: vf.Trace) -> dict[str, object]:
    """Return a rollout of one branch in the form that `/v1/training/update` takes."""
    (branch,) = trace.branches
    first = branch.sampled_mask.index(True)
    return {
        "prompt_token_ids": branch.token_ids[:first],
        "token_ids": branch.token_ids[first:],
        "mask": [int(own) for own in branch.sampled_mask[first:]],
        "logprobs": [min(p, 0.0) for p in branch.logprobs[first:]],
        "reward": trace.reward,
    }


async def run(url: str, model: str, tokenizer: str, tasks: int, rollouts: int) -> None:
    agent = {"harness": {"id": "sorting_verifiers"}, "runtime": {"type": "subprocess"}}
    env = load_environment(resolve_env_config({"taskset": {"id": "sorting_verifiers"}, "agent": agent}))
    client = TrainClientConfig(base_url=f"{url}/v1", renderer_model_name=tokenizer, api_key_var="NO_KEY")
    context = ModelContext(client=client, model=model, sampling=SamplingConfig(max_tokens=16, temperature=1.0))

    async def ended(episode: object) -> None:
        pass

    async with env.serving():
        slots = [slot for task in env.taskset.take(tasks) for slot in env.slots(task, rollouts)]
        episodes = await asyncio.gather(*(env.run_slot(slot, context, None, ended) for slot in slots))
    print(json.dumps([trajectory(trace) for episode in episodes for trace in episode.traces]))


if __name__ == "__main__":
    asyncio.run(run(*sys.argv[1:4], *map(int, sys.argv[4:6])))
