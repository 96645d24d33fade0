"""Measure how long a learning server takes to serve its last version again after `kill -9` in the middle of an update.

    python benchmarks/restart.py --json-out benchmarks/results/restart.json

The server is that of `tandem demo learn` without checkpoints on the way. Its client teaches it until update number
`--update` is under way; then all of its processes are killed. `last_version_s` is the time from the start of the next
process until the last version that was acknowledged has answered a request and nothing is left to be computed again;
`ready_s` is that of `/health` alone, which a server without anything to come back to needs as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from mlx_tandem import demo
from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.demo.learner import POLICY, SETTINGS, Learner
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import HttpError, once
from mlx_tandem.server.sockets import unused_port

POLL_SECONDS = 0.02


class Life:
    """One life of the server."""

    def __init__(self, settings: Path) -> None:
        port = unused_port()
        self.url = f"http://127.0.0.1:{port}"
        self.began = time.perf_counter()
        command = [sys.executable, "-m", "mlx_tandem", "serve", str(demo.MODEL_PATH), "--port", str(port)]
        self._process = subprocess.Popen(
            [*command, "--config", str(settings)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def ready(self) -> float:
        """Wait until the server is ready; return the seconds since its start."""
        while True:
            if self._process.poll() is not None:
                raise SystemExit("the server did not start")
            try:
                status, _ = await once(self.url, "GET", "/health")
            except (HttpError, OSError):
                status = 0
            if status == 200:
                return time.perf_counter() - self.began
            await asyncio.sleep(POLL_SECONDS)

    async def status(self) -> dict[str, Any]:
        """Return the status of training."""
        found: dict[str, Any] = (await once(self.url, "GET", "/v1/training/status"))[1]
        return found

    def kill(self) -> None:
        """Kill all processes of the server."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


async def taught(life: Life, update: int, seed: int) -> dict[str, Any]:
    """Teach a server until this update is under way; return the status of the moment.

    The rewards change places, so that the answers of a group differ in them for as long as it takes.
    """
    await life.ready()
    learner = Learner(life.url, seed=seed, rewards="shuffled")
    teaching = asyncio.create_task(learner.learn(10 * update))
    while True:
        status = await life.status()
        if teaching.done():
            await teaching
        if status["updates"] >= update - 1 and status["busy"]:
            await asyncio.sleep(random.Random(seed).uniform(0.0, 0.05))
            teaching.cancel()
            return status
        await asyncio.sleep(POLL_SECONDS)


async def back(life: Life, last: int) -> dict[str, Any]:
    """Return the times at which a server is ready, and serves the version that was acknowledged last."""
    ready, most = await life.ready(), 0
    while True:
        status = await life.status()
        most = max(most, status["recovering"])
        if not status["recovering"] and status["version"] >= last:
            body = {"model": f"{POLICY}@{last}", "prompt": "Sort down: 2 8 5", "max_tokens": 8}
            code, reply = await once(life.url, "POST", "/v1/completions", body)
            if code == 200:
                return {
                    "ready_s": round(ready, 2),
                    "last_version_s": round(time.perf_counter() - life.began, 2),
                    "updates_computed_again": most,
                    "updates": status["updates"],
                    "version": last,
                }
            raise SystemExit(f"version {last} is not served: {reply}")
        await asyncio.sleep(POLL_SECONDS)


async def measured(update: int, seed: int) -> dict[str, Any]:
    """Return the figures of one kill."""
    with tempfile.TemporaryDirectory(prefix="tandem-restart-") as scratch:
        settings = Path(scratch) / "learn.yaml"
        tree = {
            "rl_training": SETTINGS | {"seed": seed},
            "checkpointing": {"checkpoint_dir": f"{scratch}/checkpoints", "interval": 500},
        }
        settings.write_text(yaml.safe_dump(tree), encoding="utf-8")
        life = Life(settings)
        try:
            status = await taught(life, update, seed)
        finally:
            life.kill()
        life = Life(settings)
        try:
            return await back(life, status["version"]) | {"killed_in_update": status["updates"] + 1}
        finally:
            life.kill()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    runs = []
    for seed in range(args.repeats):
        runs.append(asyncio.run(measured(args.update, seed)))
        print(json.dumps(runs[-1]), flush=True)
    if args.json_out:
        write_json(args.json_out, {"runs": runs} | machine.describe())


if __name__ == "__main__":
    main()
