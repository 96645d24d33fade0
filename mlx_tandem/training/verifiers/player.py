"""The program that plays an environment of verifiers. A server starts it and tells it when to play.

It runs with the Python in which verifiers is installed, and imports nothing of this package. Standard input has JSON
lines: first the settings, and then a request for each round, {"model": ..., "episodes": ...}. Standard output has JSON
lines: {"ready": VERSION} first; in a round, {"group": ...} with the answers to one task in Atropos' form; and
{"played": ..., "failed": ..., "error": ...} at its end. The end of standard input ends the program.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOT_TRAINED = -100
"""The mask of a token that the trained adapter has not drawn."""

MOST_BYTES = 1 << 20
"""Most bytes of a request."""

KEY = "TANDEM_API_KEY"
"""The environment variable that has the server's key; it is absent where the server has none."""

DRAWN = ("temperature", "top_p", "top_k", "min_p")
"""The sampling parameters that a group reports. Those that the file leaves out do not change the distribution."""


def read(environment: str, url: str, tokenizer: str) -> Any:
    """Return the configuration, from a TOML file as vf-eval takes it or from the id of a taskset alone."""
    from verifiers.v1.configs.cli.eval import EvalConfig

    if environment.endswith(".toml"):
        data = tomllib.loads(Path(environment).read_text(encoding="utf-8"))
    else:
        data = {"env": {"taskset": {"id": environment}}}
    client = {"type": "train", "base_url": f"{url}/v1", "renderer_model_name": tokenizer, "api_key_var": KEY}
    return EvalConfig.model_validate(data | {"model": "policy", "client": client})


def tasks(taskset: Any, select: Any) -> Iterator[Any]:
    """Yield the selected tasks without end: those of a finite taskset again and again, each time in another order."""
    selected = taskset.select(select)
    for seed in range(sys.maxsize):
        count = 0
        for task in selected.shuffle(seed) if selected.bounded else selected:
            count += 1
            yield task
        if not count:
            raise ValueError("the taskset has no task")


def answers(trace: Any) -> list[dict[str, Any]]:
    """Return what can be learned from a trace: for each branch, its tokens, their masks and logprobs, and the reward.

    What a branch shares with an earlier one is trained on there only.
    """
    found: list[dict[str, Any]] = []
    done: set[int] = set()
    for branch in trace.branches:
        mask = [own and id(node) not in done for node in branch.nodes for own in node.mask]
        done.update(map(id, branch.nodes))
        if not (branch.trainable and any(mask)):
            continue
        tokens = branch.token_ids
        # verifiers fills in 0 for logprobs that it lacks, which would say that nothing else could have been drawn.
        told = all(len(node.logprobs or ()) == sum(node.mask) for node in branch.nodes)
        found.append({
            "tokens": tokens,
            "masks": [token if own else NOT_TRAINED for token, own in zip(tokens, mask, strict=True)],
            "logprobs": [p if own else 1.0 for p, own in zip(branch.logprobs, mask, strict=True)] if told else [],
            "score": trace.reward,
            "sampling": {
                name: value
                for name, value in trace.agent.config.sampling.model_dump().items()
                if name in DRAWN and value is not None
            },
        })  # fmt: skip
    return found


def groups(episodes: list[Any], model: str) -> list[dict[str, Any]]:
    """Return a group in Atropos' form for each agent that the model has played in the episodes of one task."""
    by_agent: dict[str, list[dict[str, Any]]] = {}
    for episode in episodes:
        for trace in episode.traces:
            if trace.agent.trainable and trace.agent.config.model == model:
                by_agent.setdefault(trace.agent.name, []).extend(answers(trace))
    return [
        {
            "tokens": [answer["tokens"] for answer in own],
            "masks": [answer["masks"] for answer in own],
            "scores": [answer["score"] for answer in own],
            "inference_logprobs": [answer["logprobs"] for answer in own],
            "overrides": [answer["sampling"] for answer in own],
        }
        for own in by_agent.values()
        if own
    ]


class Player:
    """An environment that is loaded and can be played; `say` writes an object as a line."""

    def __init__(self, config: Any, rollouts: int, say: Any):
        """Load the environment. A task is played `rollouts` times unless the file says something else."""
        from verifiers.v1.utils.loaders import load_environment

        self._config, self._say = config, say
        self._rollouts = config.num_rollouts if "num_rollouts" in config.model_fields_set else rollouts
        self.env = load_environment(config.env)
        self._tasks = tasks(self.env.taskset, config.select)
        self._gate = asyncio.Semaphore(config.max_concurrent or sys.maxsize)
        self._failed = 0
        self._error = ""

    async def round(self, model: str, episodes: int) -> None:
        """Play at least `episodes` episodes, with as many tasks as that takes."""
        from verifiers.v1.clients import ModelContext

        context = ModelContext(client=self._config.client, model=model, sampling=self._config.sampling)
        self._failed, self._error = 0, ""
        count = -(-episodes // self._rollouts)
        async with asyncio.TaskGroup() as playing:
            for _ in range(count):
                playing.create_task(self._task(next(self._tasks), context))
        self._say({"played": count * self._rollouts, "failed": self._failed, "error": self._error})

    async def _task(self, task: Any, context: Any) -> None:
        slots = self.env.slots(task, self._rollouts)
        played = await asyncio.gather(*(self.env.run_slot(slot, context, self._gate) for slot in slots))
        good = []
        for episode in played:
            if error := self._why_not(episode):
                self._failed += 1
                self._error = error[:500]
            else:
                good.append(episode)
        for group in groups(good, context.model):
            self._say({"group": group})

    def _why_not(self, episode: Any) -> str:
        """Return why nothing can be learned from an episode; empty if something can."""
        if self.env.complete(episode):
            finite = all(math.isfinite(trace.reward) for trace in episode.traces)
            return "" if finite else "a reward is no finite number"
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        return f"{errors[-1].type}: {errors[-1].message}" if errors else "an episode was not complete"


async def run() -> None:
    """Play what is asked for until standard input ends."""
    # Programs that the environment starts, and what it prints, must not reach the two pipes.
    asked, said = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(value: Any) -> None:
        said.write(json.dumps(value) + "\n")
        said.flush()

    lines = asyncio.StreamReader(MOST_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), asked)
    settings = json.loads(await lines.readline())
    environment = settings["environment"]
    sys.path.append(str(Path(environment).resolve().parent) if environment.endswith(".toml") else os.getcwd())
    config = read(environment, settings["url"], settings["tokenizer"])
    player = Player(config, settings["rollouts"], say)
    async with player.env.serving():
        say({"ready": importlib.metadata.version("verifiers")})
        line = await lines.readline()
        while line:
            following = asyncio.ensure_future(lines.readline())
            playing = asyncio.ensure_future(player.round(**json.loads(line)))
            await asyncio.wait({following, playing}, return_when=asyncio.FIRST_COMPLETED)
            if not playing.done() and not following.result():  # the server has gone
                playing.cancel()
                return
            await playing
            line = await following


if __name__ == "__main__":
    try:
        asyncio.run(run())
    except Exception as e:
        first = e.exceptions[0] if isinstance(e, ExceptionGroup) else e
        sys.exit(f"{type(first).__name__}: {' '.join(str(first).split())}")
