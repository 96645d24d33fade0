"""A server that plays an environment of verifiers by itself and learns from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from mlx_tandem.server.sockets import unused_port
from tests.commands import running
from tests.verifiers_double import python
from tests.waiting import until

SMALL = ["--max-model-len", "1024", "--num-blocks", "512", "--lora-rank", "4"]
SORTING = """
num_rollouts = 4
[env.taskset]
id = "sorting"
fails = 3
"""


def players() -> dict[int, int]:
    """The programs that play environments, with their parents."""
    listed = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return {int(pid): int(parent) for pid, parent, args in rows if "training/verifiers/player.py" in args}


def test_an_environment_is_played_and_learned_from(tmp_path: Path):
    (tmp_path / "sorting.toml").write_text(SORTING)
    port = unused_port()

    def get(path: str) -> str:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"authorization": "Bearer secret"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return str(reply.read().decode())

    def status() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(get("/v1/training/status"))
        return found

    words = [sys.executable, "-m", "mlx_tandem", "train", "rl", "--environment", "sorting.toml", *SMALL]
    words += [
        "--environment-python",
        str(python(tmp_path)),
        "--port",
        str(port),
        "--update-frequency",
        "8",
        "--api-key",
        "secret",
    ]
    with running(words, port, tmp_path) as server:

        def player() -> int | None:
            return next((pid for pid, parent in players().items() if parent == server.process.pid), None)

        until(lambda: status()["updates"] >= 2 and status()["environment"]["failed_episodes"])
        now = status()
        environment = now["environment"]
        assert (environment["environment"], environment["verifiers"]) == ("sorting.toml", "0.4.0")
        assert environment["trajectories"] >= 16 and environment["failed_episodes"] > 0
        assert environment["refused_groups"] == 0 and now["last_verdict"] == "ok"
        assert now["trajectories_collected"] == environment["trajectories"]
        assert "tandem_training_environment_trajectories_total" in get("/metrics")
        first, rounds = player(), environment["rounds"]
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: status()["environment"]["rounds"] > rounds + 2)
        second = player()
        assert second not in (None, first)
        assert server.stop() == 0
    assert second not in players(), "it ends with the server"
