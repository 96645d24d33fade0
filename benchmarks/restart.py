"""Measure how long a learning server takes to serve its last version again after `kill -9` in the middle of an update.

    python benchmarks/restart.py --json-out benchmarks/results/restart.json

The server is that of `tandem demo learn` without checkpoints on the way. A client posts updates of as many answers as
that demo's have, until each of the update numbers of `--updates` is under way; then all of the server's processes are
killed, and its folder is copied. After that servers
start on copies of these folders and of an empty one, in turn, so that what else the machine does slows all down alike.

`last_version_s` is the time from the start of a process until the last version that was acknowledged has answered a
request and nothing is left to be computed again; `ready_s` is that of `/health` alone. `cpu_s` and `ready_cpu_s` are
the processor time of all of the server's processes in these times (on Linux), and `load` is the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from beside_trl import family

from mlx_tandem import demo
from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.demo.learner import POLICY, SETTINGS, SKILL, question
from mlx_tandem.cli.outputs import argument, write_json
from mlx_tandem.http_client import HttpError, once
from mlx_tandem.server.sockets import unused_port

POLL_SECONDS = 0.02
PROMPTS = 4  # of an update


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

    def cpu_seconds(self) -> float | None:
        """Return the processor time of all processes of the server; None where the system does not say."""
        ticks = 0
        for pid in family(self._process.pid):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:15]))  # its own, and that of children that have ended
        return ticks / os.sysconf("SC_CLK_TCK") if ticks else None

    def kill(self) -> None:
        """Kill all processes of the server."""
        for pid in family(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


def answers(rng: random.Random) -> list[dict[str, Any]]:
    """Return the answers of one update: random digits to some questions, with random rewards."""
    asked = [SKILL.format(question(rng)[0]) for _ in range(PROMPTS)]
    return [
        {"prompt": prompt, "completion": " " + question(rng)[0], "reward": rng.random()}
        for prompt in asked
        for _ in range(SETTINGS["update_frequency"] // PROMPTS)
    ]


async def teach(life: Life, rng: random.Random) -> None:
    """Post one update after the other."""
    while True:
        code, reply = await once(life.url, "POST", "/v1/training/update", {"trajectories": answers(rng), "wait": True})
        if code != 200:
            raise SystemExit(f"an update was refused: {reply}")


async def taught(life: Life, update: int, seed: int) -> int:
    """Teach a server until this update is under way; return the last version that was acknowledged."""
    await life.ready()
    rng = random.Random(f"{seed}/{update}")
    teaching = asyncio.create_task(teach(life, rng))
    while True:
        status = await life.status()
        if teaching.done():
            await teaching
        if status["updates"] >= update - 1 and status["busy"]:
            await asyncio.sleep(rng.uniform(0.0, 0.05))
            teaching.cancel()
            version: int = status["version"]
            return version
        await asyncio.sleep(POLL_SECONDS)


async def back(life: Life, last: int) -> dict[str, Any]:
    """Return the times at which a server is ready, and serves the version that was acknowledged last."""
    ready, cpu = await life.ready(), life.cpu_seconds()
    most = 0
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
                    "ready_cpu_s": cpu,
                    "cpu_s": life.cpu_seconds(),
                    "load": round(os.getloadavg()[0], 1),
                    "updates_computed_again": most,
                    "updates": status["updates"],
                    "version": last,
                }
            raise SystemExit(f"version {last} is not served: {reply}")
        await asyncio.sleep(POLL_SECONDS)


def settings_for(place: Path, seed: int) -> Path:
    """Write the settings of a server that has its checkpoints in `place`; return their file."""
    tree = {
        "rl_training": SETTINGS | {"seed": seed},
        "checkpointing": {"checkpoint_dir": str(place / "checkpoints"), "interval": 500},
    }
    file = place / "learn.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    return file


def killed(kept: Path, updates: Sequence[int], seed: int) -> dict[int, tuple[Path, int]]:
    """Teach a server and kill it in the middle of each of these updates, unless an earlier run has done that.

    Return the folder that each kill has left in `kept`, and the version that was acknowledged last, by the update.
    Update 0 stands for an empty folder, in which version 1 is the first.
    """
    place, empty = kept / "taught", kept / "0"
    for folder in (place, empty):
        folder.mkdir(parents=True, exist_ok=True)
    left = {0: (empty, 1)}
    for update in sorted(updates):
        folder, acknowledged = kept / str(update), kept / f"{update}.version"
        if not acknowledged.exists():
            life = Life(settings_for(place, seed))
            try:
                version = asyncio.run(taught(life, update, seed))
            finally:
                life.kill()
            shutil.copytree(place / "checkpoints", folder)
            acknowledged.write_text(str(version), encoding="utf-8")
            print(f"killed in update {update}", file=sys.stderr, flush=True)
        left[update] = folder, int(acknowledged.read_text(encoding="utf-8"))
    return left


def started(folder: Path, version: int, seed: int) -> dict[str, Any]:
    """Return the figures of a server that starts on a copy of what a kill has left."""
    with tempfile.TemporaryDirectory(prefix="tandem-restart-") as copy:
        shutil.copytree(folder, Path(copy) / "checkpoints")
        life = Life(settings_for(Path(copy), seed))
        try:
            return asyncio.run(back(life, version))
        finally:
            life.kill()


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the medians of the times of some runs."""
    kinds = ("ready_s", "last_version_s", "ready_cpu_s", "cpu_s")
    return {kind: round(statistics.median(run[kind] for run in runs), 2) for kind in kinds if runs[0][kind] is not None}


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, nargs="+", default=[30, 300])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kept", type=Path, help="the folder of what the kills leave, for later runs; else it goes")
    parser.add_argument("--json-out", type=argument)
    args = parser.parse_args()
    runs: dict[int, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-restart-") as scratch:
        left = killed(args.kept or Path(scratch), args.updates, args.seed)
        for _ in range(args.repeats):
            for update, (folder, version) in left.items():
                runs.setdefault(update, []).append(started(folder, version, args.seed))
                print(update, json.dumps(runs[update][-1]), flush=True)
    found = [{"killed_in_update": update, "medians": medians(own), "runs": own} for update, own in runs.items()]
    if args.json_out:
        write_json(args.json_out, {"restarts": found} | machine.describe())


if __name__ == "__main__":
    main()
