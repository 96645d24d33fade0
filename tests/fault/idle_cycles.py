"""An engine is unloaded and woken again and again; what it answers, counts and keeps is as before each time.

python -m tests.fault.idle_cycles --cycles 100 --json-out benchmarks/results/idle_cycles.json

Each cycle asks the base, an adapter of the settings, one that was loaded by a request, and an alias, and waits until
the engine's process is gone. It measures how long after the limit that is, how long the next answer takes, and what the
front holds meanwhile: memory, open files, threads and processes. Before that, a server is started twice, and the time
of the second start, from the launch to the first answer, is what an answer that wakes the engine is compared with.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from mlx_tandem import demo
from mlx_tandem.cli.bench import machine
from mlx_tandem.cli.outputs import write_json
from mlx_tandem.config import Config, DiskCacheConfig
from tests.serving import ADAPTER_ROOT, RunningServer, demo_config, serving
from tests.waiting import until

ASKED = ("tandem-demo", "shout", "loud", "either")
"""The base, an adapter of the settings, one that a request has loaded, and an alias."""

QUESTION = "What is 12 + 5? " + "Think of the sum, and then of the story of the fox that counted its steps. " * 4
"""Long enough for blocks that are kept on the drive."""


@dataclass
class Cycle:
    """What one cycle has shown. Times in seconds, memory in bytes."""

    gone_after: float  # from the limit until the process of the engine has ended
    answered_after: float  # from a request to the idle server until its answer
    memory: int  # resident memory of the front while there is no engine
    files: int  # open files of the front then
    threads: int  # threads of the front then
    processes: int  # processes that the front has started and that are there then


def config(folder: Path, limit: float, model: Path = demo.MODEL_PATH) -> Config:
    """Return the settings of a server that unloads its engine, with a cache on the drive."""
    base = demo_config(model, idle_unload_s=limit)
    return replace(base, engine=replace(base.engine, disk=DiskCacheConfig(dir=str(folder), policy="write_through")))


def prepare(server: RunningServer) -> None:
    """Load an adapter and put an alias by requests."""
    reply = server.client.post("/v1/adapters", json={"name": "loud", "path": str(ADAPTER_ROOT / "shout")})
    assert reply.status_code == 200, reply.text
    reply = server.client.put("/v1/aliases/either", json={"arms": [{"adapter": "json", "weight": 1}]})
    assert reply.status_code == 200, reply.text


def answers(server: RunningServer) -> list[str]:
    """Return the answers of all models that are asked."""
    found = [server.chat(QUESTION, model=name, temperature=0) for name in ASKED]
    assert {reply.status_code for reply in found} == {200}, [reply.text for reply in found]
    return [reply.json()["choices"][0]["message"]["content"] for reply in found]


def counters(server: RunningServer) -> dict[str, float]:
    """Return the values of all counters of /metrics."""
    lines = server.client.get("/metrics").text.splitlines()
    values = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in values if "_total" in name or "_count" in name or "_sum" in name}


def cycle(server: RunningServer, limit: float, expected: list[str]) -> Cycle:
    """Wait until the engine is gone, and wake it. The answers have to be the `expected` ones."""
    engine = server.engine_pid()
    began = time.monotonic()
    before = counters(server)
    until(lambda: not Path(f"/proc/{engine}").exists())
    gone = time.monotonic() - began - limit
    until(lambda: server.client.get("/health").json()["status"] == "idle")
    front = server.process.pid
    status = Path(f"/proc/{front}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines())
    children = Path(f"/proc/{front}/task/{front}/children").read_text().split()
    began = time.monotonic()
    reply = server.chat(QUESTION, model="shout", temperature=0)
    answered = time.monotonic() - began
    assert reply.json()["choices"][0]["message"]["content"] == expected[1], reply.text
    assert answers(server) == expected
    after = counters(server)
    assert [name for name in before if after.get(name, -1.0) < before[name]] == [], "counters do not go backwards"
    return Cycle(
        gone,
        answered,
        int(lines["VmRSS"].split()[0]) * 1024,
        len(os.listdir(f"/proc/{front}/fd")),
        int(lines["Threads"]),
        len(children),
    )


def second_start(folder: Path, limit: float) -> float:
    """Return the seconds from the launch of a server to its first answer, at its second start."""
    for _ in range(2):
        began = time.monotonic()
        with serving(config(folder, limit)) as server:
            assert server.chat(QUESTION, model="shout", temperature=0).status_code == 200
            took = time.monotonic() - began
    return took


def main() -> int:
    """Run the cycles, print a summary, and write all figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--limit", type=float, default=0.5, help="seconds without use until the engine is unloaded")
    parser.add_argument("--json-out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start = second_start(Path(folder), options.limit)
        with serving(config(Path(folder), options.limit)) as server:
            prepare(server)
            expected = answers(server)
            found = [cycle(server, options.limit, expected) for _ in range(options.cycles)]
    settled = found[len(found) // 10 :]  # the first cycles import what is used first
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "limit_s": options.limit,
        "second_start_s": start,
        "most_gone_after_s": max(c.gone_after for c in found),
        "median_answered_after_s": statistics.median(c.answered_after for c in found),
        "most_answered_after_s": max(c.answered_after for c in found),
        "memory_growth": settled[-1].memory - settled[0].memory,
        "files": [min(c.files for c in settled), max(c.files for c in settled)],
        "threads": [min(c.threads for c in settled), max(c.threads for c in settled)],
        "processes": [min(c.processes for c in settled), max(c.processes for c in settled)],
        "cycles": [asdict(c) for c in found],
    }
    for name, value in result.items():
        if name not in ("cycles", "machine"):
            print(f"{name}: {value}")
    if options.json_out is not None:
        write_json(options.json_out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
