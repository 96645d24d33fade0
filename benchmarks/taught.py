"""The frame of benchmarks in which a served model learns a task over HTTP: a client, its curve, runs and results."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from partial import Results, stop_cleanly
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.demo.learner import POLL_SECONDS
from mlx_tandem.cli.outputs import argument
from mlx_tandem.http_client import once

EVERY = 10  # updates between two evaluations
WANTED = 0.8


class Teacher(ABC):
    """A client that has a server learn a task."""

    def __init__(self, url: str):
        self._url = url

    async def json(self, method: str, path: str, body: object = None) -> Any:
        """Return the body of a reply. Raises RuntimeError for a refusal."""
        status, reply = await once(self._url, method, path, body)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {reply}")
        return reply

    @abstractmethod
    async def accuracy(self) -> float:
        """Return the share of right answers of the served version to questions that nothing is learned from."""

    @abstractmethod
    async def batch(self, done: int) -> int:
        """Ask one batch, and wait for the update that follows; return the number of updates."""

    async def updated(self, done: int) -> int:
        """Wait until more than `done` updates are done or nothing is left to do; return the number of updates."""
        while True:
            status = await self.json("GET", "/v1/training/status")
            if status["updates"] > done or not status["busy"]:
                return int(status["updates"])
            await asyncio.sleep(POLL_SECONDS)

    async def curve(self, updates: int) -> dict[str, Any]:
        """Return the accuracy after every few updates, and the number of updates after which it was as wanted."""
        done, accuracy = 0, {0: await self.accuracy()}
        while done < updates:
            goal = min(done + EVERY, updates)
            while done < goal:
                done = await self.batch(done)
            accuracy[done] = await self.accuracy()
        return {
            "accuracy": {str(at): round(share, 4) for at, share in accuracy.items()},
            "updates_to_wanted": next((at for at, share in accuracy.items() if share >= WANTED), None),
        }


def run(training: Mapping[str, Any], room: Sequence[str], learn: Callable[[str], Any]) -> dict[str, Any]:
    """Return the device and what the coroutine `learn(url)` finds on a fresh server with these settings of learning.

    room: the options of its size.
    """
    with tempfile.TemporaryDirectory(prefix="tandem-taught-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        tree = {"rl_training": dict(training), "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints"}}
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings), *room).started(demo.MODEL_PATH) as server:
            found: dict[str, Any] = asyncio.run(learn(server.url))
            return {"device": server.device()} | found


def main(
    about: str, runs: Sequence[str], settings: Mapping[str, Any], measure: Callable[[str, int, int], dict[str, Any]]
) -> None:
    """Run the benchmark: `measure(run, seed, updates)` for each seed and each of `runs`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--runs", default=",".join(runs))
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out, settings=dict(settings), wanted=WANTED)
    found: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.runs.split(","):
            found.append({"run": name, "seed": seed} | measure(name, seed, args.updates))
            results.add(results=found)
            print(found[-1], file=sys.stderr, flush=True)
    results.finish(results=found)
