"""An environment of Atropos that plays without end.

python sorting_atropos.py serve   with API, SERVER and MODEL in the environment: two addresses and the base's folder
"""

from __future__ import annotations

import os
import random
from typing import Any

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup

API, SERVER, MODEL = (os.environ[name] for name in ("API", "SERVER", "MODEL"))


class Sorting(BaseEnv):
    name = "sorting"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        env = BaseEnvConfig(
            tokenizer_name=MODEL,
            group_size=8,
            use_wandb=False,
            rollout_server_url=API,
            total_steps=1_000_000,
            batch_size=32,
            steps_per_eval=1_000_000,
            max_token_length=64,
            wandb_name="sorting",
            ensure_scores_are_not_same=False,
        )
        server = APIServerConfig(
            model_name=MODEL,
            base_url=f"{SERVER}/v1",
            api_key="x",
            num_requests_for_eval=1,
            server_type=os.environ.get("TYPE", "vllm"),
        )
        return env, [server]

    async def setup(self) -> None:
        self.draw = random.Random()

    async def get_next_item(self) -> tuple[int, ...]:
        return tuple(self.draw.sample(range(10), 4))

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: tuple[int, ...]) -> tuple[ScoredDataGroup, list[Any]]:
        messages = [{"role": "user", "content": "Sort down: " + " ".join(map(str, item))}]
        answer = " ".join(map(str, sorted(item, reverse=True)))
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            n = self.config.group_size
            reply = await managed.chat_completion(messages=messages, n=n, max_tokens=16, temperature=1.0)
            for choice, node in zip(reply.choices, managed.get_state()["nodes"], strict=True):
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(float(choice.message.content.strip() == answer))
        return group, []


if __name__ == "__main__":
    Sorting.cli()
