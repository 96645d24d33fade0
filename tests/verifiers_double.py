"""The part of verifiers that the player of environments uses, for machines on which verifiers is not installed.

Names, arguments and fields are those of verifiers 0.4.0, with which `tests/clients/test_environments.py` runs where it
is installed. `installed` lays the modules out in a folder, which then belongs on PYTHONPATH.

`[env.taskset]` of a file says what happens: `id` begins with "sorting"; `tasks`: how many there are, which are numbers;
`answers`: the server's, or token ids that nobody draws; `fails`: the reply of every task of this number is an error;
`ends`: the program ends at this task; `hangs`: this task has no end; `worth`: the
reward of every second episode, in place of 0; `tells`: the file into which it writes its environment variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
MODULES = {
    "v1/configs/cli/eval.py": "EvalConfig",
    "v1/utils/loaders.py": "load_environment",
    "v1/clients.py": "ModelContext",
}
"""The modules of verifiers that are imported, each with what is imported of it."""


def installed(folder: Path, version: str = "0.4.0") -> Path:
    """The folder with the package and its metadata, made there."""
    for path, name in MODULES.items():
        file = folder / "verifiers" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from tests.verifiers_double import {name}\n")
    metadata = folder / f"verifiers-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: verifiers\nVersion: {version}\n")
    return folder


def python(folder: Path) -> Path:
    """A Python that has the package, made in `folder`."""
    packages = os.pathsep.join((str(installed(folder / "packages")), str(ROOT)))
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    program.chmod(0o700)
    return program


class EvalConfig:
    @classmethod
    def model_validate(cls, data: dict[str, Any]) -> Any:
        return SimpleNamespace(
            env=data["env"],
            client=SimpleNamespace(**data["client"]),
            sampling=data.get("sampling", {}),
            select=SimpleNamespace(limit=data.get("select", {}).get("limit")),
            num_rollouts=data.get("num_rollouts", 1),
            max_concurrent=data.get("max_concurrent", 128),
            model_fields_set=set(data),
        )


@dataclass(frozen=True)
class ModelContext:
    model: str
    client: Any
    sampling: Any


class Taskset:
    bounded = True

    def __init__(self, tasks: list[int]) -> None:
        self._tasks = tasks

    def select(self, select: Any) -> Taskset:
        return Taskset(self._tasks[: select.limit])

    def shuffle(self, seed: int) -> Taskset:
        return Taskset(random.Random(seed).sample(self._tasks, len(self._tasks)))

    def __iter__(self) -> Iterator[int]:
        return iter(self._tasks)


def node(tokens: list[int], logprobs: list[float] | None = None) -> Any:
    """A message of a trace; one with logprobs was drawn."""
    return SimpleNamespace(token_ids=tokens, mask=[logprobs is not None] * len(tokens), logprobs=logprobs)


def branch(*nodes: Any, trainable: bool = True) -> Any:
    return SimpleNamespace(
        nodes=list(nodes),
        trainable=trainable,
        token_ids=[t for n in nodes for t in n.token_ids],
        logprobs=[p for n in nodes for p in n.logprobs or [0.0] * len(n.token_ids)],
    )


def trace(
    *branches: Any, reward: float, model: str = "policy@1", name: str = "agent", sampling: dict[str, Any] | None = None
) -> Any:
    config = SimpleNamespace(model=model, sampling=SimpleNamespace(model_dump=lambda: sampling or {"temperature": 1.0}))
    agent = SimpleNamespace(name=name, trainable=True, config=config)
    return SimpleNamespace(branches=list(branches), reward=reward, agent=agent, errors=[])


def episode(*traces: Any, error: str = "") -> Any:
    errors = [SimpleNamespace(type="EnvError", message=error)] if error else []
    return SimpleNamespace(traces=list(traces), errors=errors, ok=not error)


class Env:
    def __init__(self, config: dict[str, Any]) -> None:
        self._options = config["taskset"]
        if not self._options["id"].startswith("sorting"):
            raise ModuleNotFoundError(f"taskset {self._options['id']!r} not found")
        self.taskset = Taskset(list(range(self._options.get("tasks", 4))))
        self._rewards = itertools.cycle((1.0, float(self._options.get("worth", 0.0))))
        print("an environment may print what it likes")
        if path := self._options.get("tells"):
            Path(path).write_text(json.dumps(dict(os.environ)))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    def slots(self, task: int, n: int) -> list[int]:
        return [task] * n

    def complete(self, episode: Any) -> bool:
        return bool(episode.ok)

    async def run_slot(self, slot: int, context: ModelContext, gate: asyncio.Semaphore) -> Any:
        if slot == self._options.get("ends"):
            os._exit(3)
        if slot == self._options.get("hangs"):
            await asyncio.Event().wait()
        if slot == self._options.get("fails"):
            return episode(error="the server said 503")
        prompt = [3, 4 + slot]
        async with gate:
            tokens, logprobs = await asyncio.to_thread(self._answer, prompt, context)
        found = trace(
            branch(node(prompt), node(tokens, logprobs)),
            reward=next(self._rewards),
            model=context.model,
            sampling=context.sampling,
        )
        return episode(found)

    def _answer(self, prompt: list[int], context: ModelContext) -> tuple[list[int], list[float]]:
        if answers := self._options.get("answers"):
            return answers, [-0.5] * len(answers)
        body = {
            "model": context.model,
            "token_ids": prompt,
            "sampling_params": context.sampling | {"max_tokens": 4, "logprobs": 1, "ignore_eos": True},
        }
        request = urllib.request.Request(
            f"{context.client.base_url.removesuffix('/v1')}/inference/v1/generate",
            json.dumps(body).encode(),
            {
                "content-type": "application/json",
                "authorization": f"Bearer {os.environ.get(context.client.api_key_var, 'EMPTY')}",
            },
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            (choice,) = json.load(reply)["choices"]
        return choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


def load_environment(config: dict[str, Any]) -> Env:
    return Env(config)
