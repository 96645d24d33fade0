"""Four adapters that learn in one server at once, compared with the same four one after the other.

    python benchmarks/learn_several.py --json-out benchmarks/results/learn_several.json

Each adapter has a rank and an algorithm of its own, and updates of as many answers as the others. In each round every
adapter does its updates while no other learns, and then all four do theirs at once; which comes first changes from
round to round.

A device computes one thing at a time: four that take turns cannot have four times the speed of one that has it for
itself. `of_alone` is the time of the four alone, added up, over the time of the four at once, for the same work.
`slowest_over_fastest` is the longest time of one of the four at once over the shortest: near 1 where shares are fair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml
from servers import tandem

from mlx_tandem import demo
from mlx_tandem.cli.bench.machine import describe
from mlx_tandem.cli.outputs import argument, write_json

ADAPTERS: dict[str, dict[str, Any]] = {
    "policy": {"lora_rank": 16, "algorithm": "grpo"},
    "second": {"lora_rank": 8, "algorithm": "gspo"},
    "third": {"lora_rank": 4, "algorithm": "cispo"},
    "fourth": {"lora_rank": 32, "algorithm": "dr_grpo"},
}
SETTINGS = {"enabled": True, "update_frequency": 100_000, "trajectory_buffer_size": 100_000, "guard_prompts": 0}


def trajectories(count: int, words: int) -> list[dict[str, Any]]:
    """Return answers to prompts of uneven length, in groups of four, every other one good."""
    return [
        {
            "prompt": f"Sort down: {' '.join(str((i // 4 + k) % 10) for k in range(words))}",
            "completion": " ".join(str((i * k) % 10) for k in range(words + i % 5)),
            "reward": i % 2,
        }
        for i in range(count)
    ]


class Round:
    """The updates of all adapters of one server."""

    def __init__(self, url: str, updates: int, body: list[dict[str, Any]]):
        """Prepare to ask the server at `url` for so many updates with these trajectories."""
        self._url, self._updates = url, updates
        self._body = json.dumps({"trajectories": body, "wait": True}).encode()
        self.tokens = 0

    def one(self, adapter: str) -> float:
        """Return the seconds of all updates of an adapter."""
        began = perf_counter()
        for _ in range(self._updates):
            url = f"{self._url}/v1/training/update?adapter={adapter}"
            request = urllib.request.Request(url, self._body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as reply:
                report = json.load(reply)["report"]
            assert report["outcome"] == "published", report
            self.tokens = report["tokens"]
        return perf_counter() - began

    def alone(self) -> dict[str, float]:
        """Return the seconds of each adapter while no other learns."""
        return {adapter: self.one(adapter) for adapter in ADAPTERS}

    def at_once(self) -> tuple[float, dict[str, float]]:
        """Return the seconds until all are done, and those of each."""
        began = perf_counter()
        with ThreadPoolExecutor(len(ADAPTERS)) as threads:
            each = dict(zip(ADAPTERS, threads.map(self.one, ADAPTERS), strict=True))
        return perf_counter() - began, each


def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of all rounds after the first, which warms up."""
    work, rounds = Round(url, args.updates, trajectories(args.answers, args.words)), []
    for repeat in range(-1, args.repeats):
        if repeat % 2:
            alone, (together, each) = work.alone(), work.at_once()
        else:
            (together, each), alone = work.at_once(), work.alone()
        figures = {
            "alone_s": {name: round(seconds, 3) for name, seconds in alone.items()},
            "at_once_s": round(together, 3),
            "tokens_per_s_at_once": round(len(ADAPTERS) * args.updates * work.tokens / together, 1),
            "of_alone": round(sum(alone.values()) / together, 3),
            "slowest_over_fastest": round(max(each.values()) / min(each.values()), 3),
        }
        if repeat >= 0:
            rounds.append(figures)
            print(figures, file=sys.stderr, flush=True)
    return rounds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="four adapters that learn at once")
    parser.add_argument("--updates", type=int, default=4, help="of each adapter in a round, each way")
    parser.add_argument("--answers", type=int, default=32, help="of an update")
    parser.add_argument("--words", type=int, default=16, help="of a prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-several-") as scratch:
        settings = Path(scratch) / "several.yaml"
        tree = {
            "rl_training": SETTINGS | {"adapters": ADAPTERS},
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 1_000_000},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with tandem("--config", str(settings)).started(demo.MODEL_PATH) as server:
            rounds = measure(server.url, args)
    result = {
        "adapters": ADAPTERS,
        "of_alone": statistics.median(figures["of_alone"] for figures in rounds),
        "slowest_over_fastest": statistics.median(figures["slowest_over_fastest"] for figures in rounds),
        "rounds": rounds,
    }
    if args.json_out:
        write_json(args.json_out, describe() | result)
    print(f"at once, of the sum of their speeds alone: {result['of_alone']}")


if __name__ == "__main__":
    main()
