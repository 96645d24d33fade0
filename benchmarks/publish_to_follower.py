"""How soon a follower serves what a trainer publishes, on three servers that docs/machines.md describes.

    python benchmarks/publish_to_follower.py --json-out benchmarks/results/publish_to_follower.json

A trainer learns from two answers at a time. Its clock starts when it reports that it serves the new version, and stops
when the leader, and when the follower, name this version as the one that they serve. Each of them is asked every
`POLL` seconds. Then the network between follower and leader is cut, two versions are published and served by the
leader, and the network heals: that clock starts when it heals. After each publish all three answer the same prompt,
and their answers must be the same to the last bit of each logprob.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from partial import Results, stop_cleanly

from mlx_tandem.cli.console import fail
from mlx_tandem.cli.outputs import argument
from tests.machines import Machine, Network, closing

TANDEM = [sys.executable, "-m", "mlx_tandem"]
LEARNS = ("--learning-rate", "3e-5", "--update-frequency", "16", "--lora-rank", "4")
POLL = 0.005
PATIENCE = 60.0  # seconds after which a version that is not served counts as lost
WANTED = 1.0


class Three:
    """A leader, a trainer, a follower, and the follower's way to the leader."""

    def __init__(self, folder: Path):
        """Prepare the three servers with folders of their own."""
        self.leader = Machine(
            folder / "node1", [*TANDEM, "serve", "./my-model", "--share-model", "--api-key-file", "tandem.key"]
        )
        self.network = Network(self.leader.port)
        self.trainer = Machine(
            folder / "node2",
            [*TANDEM, "train", "rl", *_joins(self.leader.port), *LEARNS],
        )
        self.follower = Machine(folder / "node3", [*TANDEM, "serve", *_joins(self.network.port)])

    def start(self) -> None:
        """Start all, and wait until all serve the first version."""
        for machine in (self.leader, self.trainer, self.follower):
            machine.start()
        self._seconds_until(self.follower, 1, time.perf_counter())

    def publish(self) -> dict[str, float]:
        """Publish a version; return the seconds until the leader and the follower serve it."""
        version = self.trainer.learn("5")
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            waits = {
                name: threads.submit(self._seconds_until, machine, version, began)
                for name, machine in (("leader_s", self.leader), ("follower_s", self.follower))
            }
        seconds = {name: round(wait.result(), 4) for name, wait in waits.items()}
        self._compare(version)
        return seconds

    def heal(self) -> dict[str, float]:
        """Publish two versions while the network is cut; return the seconds from its healing until the follower serves
        the second.
        """
        self.network.cut()
        self.trainer.learn("6")
        version = self.trainer.learn("7")
        self._seconds_until(self.leader, version, time.perf_counter())
        began = time.perf_counter()
        self.network.heal()
        seconds = self._seconds_until(self.follower, version, began)
        self._compare(version)
        return {"follower_s": round(seconds, 4)}

    def _seconds_until(self, machine: Machine, version: int, began: float) -> float:
        while machine.version() != version:
            if time.perf_counter() - began > PATIENCE:
                fail(f"version {version} was not served in {PATIENCE:g} seconds; the server wrote:\n{machine.log}")
            time.sleep(POLL)
        return time.perf_counter() - began

    def _compare(self, version: int) -> None:
        answers = [machine.answer() for machine in (self.leader, self.follower, self.trainer)]
        if {answer["model"] for answer in answers} != {f"policy@{version}"}:
            fail(f"version {version} was not answered from: {[answer['model'] for answer in answers]}")
        if not answers[0]["choices"] == answers[1]["choices"] == answers[2]["choices"]:
            fail(f"the answers of version {version} differ: {answers}")


def _joins(port: int) -> tuple[str, ...]:
    return "--connect-to", f"127.0.0.1:{port}", "--api-key-file", "tandem.key"


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Return median and maximum of each figure of the rounds."""
    return {
        name: {
            "median": round(statistics.median(each[name] for each in rounds), 4),
            "max": max(each[name] for each in rounds),
        }
        for name in rounds[0]
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="how soon a follower serves what is published")
    parser.add_argument("--publishes", type=int, default=30)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    stop_cleanly()
    results = Results(args.json_out)
    rounds: dict[str, list[dict[str, float]]] = {"published": [], "healed": []}
    with tempfile.TemporaryDirectory(prefix="tandem-follower-") as scratch:
        three = Three(Path(scratch))
        with closing(three.network, three.leader, three.trainer, three.follower):
            three.start()
            for kind, count, one in (("published", args.publishes, three.publish), ("healed", args.cuts, three.heal)):
                for _ in range(count):
                    rounds[kind].append(one())
                    print(kind, rounds[kind][-1], file=sys.stderr, flush=True)
                    results.add(**rounds)
    found = {f"{kind}_summary": summary(each) for kind, each in rounds.items() if each}
    results.finish(**found)
    late = max(each["follower_s"] for each in (*rounds["published"], *rounds["healed"]))
    print(f"served by the follower after {late} seconds at most (wanted: {WANTED:g})")


if __name__ == "__main__":
    main()
