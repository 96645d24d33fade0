"""An environment of Atropos that plays without end.

python sorting_atropos.py serve   with API, SERVER and MODEL in the environment: two addresses and the base's folder;
                                  DATA as sorting_data.py says
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import sorting_data
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
        self.rows = itertools.cycle(sorting_data.rows())

    async def get_next_item(self) -> tuple[str, str]:
        return next(self.rows)

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        pass

    async def collect_trajectories(self, item: tuple[str, str]) -> tuple[ScoredDataGroup, list[Any]]:
        question, answer = item
        messages = [{"role": "user", "content": question}]
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            n = self.config.group_size
            reply = await managed.chat_completion(messages=messages, n=n, max_tokens=16, temperature=1.0)
            for choice, node in zip(reply.choices, managed.get_state()["nodes"], strict=True):
                group["tokens"].append(node.tokens)
                group["masks"].append(node.masked_tokens)
                group["inference_logprobs"].append(node.logprobs)
                group["scores"].append(sorting_data.score(choice.message.content, answer))
        return group, []


if __name__ == "__main__":
    Sorting.cli()
