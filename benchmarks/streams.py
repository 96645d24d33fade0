"""Requests and updates that the measurements of running streams share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from mlx_tandem import demo
from mlx_tandem.cli.bench.client import BenchError, Client
from mlx_tandem.cli.bench.workloads import Workload
from mlx_tandem.http_client import once

TARGETS: tuple[str | None, ...] = (None, *demo.ADAPTER_PATHS)
"""The base and the built-in model's adapters."""

SIBLINGS = 8
"""Completions of a prompt in an update."""


def with_adapters() -> list[str]:
    """Return the options of a server that has the built-in model's adapters and computes in float32."""
    named = [word for name, path in demo.ADAPTER_PATHS.items() for word in ("--adapter", name, str(path))]
    return ["--dtype", "float32", *named]


def greedy(client: Client, count: int, targets: Sequence[str | None] = TARGETS) -> list[dict[str, Any]]:
    """Return `count` requests of the client's load to each target in turn, each with one right answer."""
    load = client.load
    bodies = []
    for i in range(count):
        target = targets[i % len(targets)]
        workload = Workload("greedy", lambda: None, load.prompt_tokens, load.max_tokens, (0.0, 1.0))
        bodies.append(client.body(workload) | ({"model": target} if target else {}))
    return bodies


def trajectories(rng: random.Random, total: int, lengths: tuple[int, int] = (24, 32)) -> list[dict[str, Any]]:
    """Return random groups for `/v1/training/update` with `total` tokens or a little more.

    `lengths` are the tokens of a prompt, and of each of its completions.
    """
    found: list[dict[str, Any]] = []
    while len(found) * sum(lengths) < total:
        prompt, group = tokens(rng, lengths[0]), f"group-{rng.getrandbits(60)}"
        for _ in range(SIBLINGS):
            answer = {"token_ids": tokens(rng, lengths[1]), "reward": rng.random()}
            found.append({"prompt_token_ids": prompt, "group": group} | answer)
    return found


def tokens(rng: random.Random, count: int) -> list[int]:
    """Return random token ids."""
    return [rng.randint(300, 500) for _ in range(count)]  # ids that every vocabulary has


async def call(url: str, method: str, path: str, body: object = None) -> Any:
    """Return the decoded body of the answer. Raise BenchError unless it is a success."""
    status, reply = await once(url, method, path, body)
    if status >= 300:
        raise BenchError(f"{method} {path}: {status} {str(reply)[:200]}")
    return reply
