"""Ranks on several machines, as MLX's own launcher starts them; here each machine is this one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlx._distributed_utils import launch

from mlx_tandem import demo
from mlx_tandem.cli.launching import launch_command, variables
from mlx_tandem.config import Config, EngineConfig, ModelConfig, ParallelConfig, ServerConfig
from mlx_tandem.server.sockets import unused_port
from tests.waiting import until

MACS = Path(__file__).parent / "hosts.json"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # MLX leaves the file open
@pytest.mark.parametrize("mode", ["ring", "jaccl", "nccl"])
def test_the_variables_that_are_shown_are_those_of_mlx_launch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's launcher is asked what it would run on each machine; nothing is run."""
    asked: list[Any] = []
    monkeypatch.setattr(launch, "_launch_with_io", lambda command_class, arguments, verbose: asked.extend(arguments))
    parallel = ParallelConfig(ranks=2, mode=mode, hostfile=str(MACS))  # type: ignore[arg-type]
    config = Config(EngineConfig(ModelConfig("model"), parallel=parallel), ServerConfig(port=9000))
    command = launch_command(config, ["serve", "model"])
    assert command[1:5] == ["--hostfile", str(MACS), "--backend", mode]
    monkeypatch.setattr(sys, "argv", command)
    launch.main()
    expected = []
    for (rank, host, _, _, files, env, ran), _ in asked:
        assert ran == command[8:] == [sys.executable, "-P", "-m", "mlx_tandem", "serve", "model"]
        own = dict(word.split("=", 1) for word in env if word.startswith(("MLX_", "NCCL_")))
        expected.append((host, {"MLX_RANK": str(rank)} | files | own))
    assert list(variables(config)) == expected


RANK = "mlx_tandem.rank_main --mode ring"


def running() -> list[str]:
    """The number and the words of every process."""
    shown = subprocess.run(["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return shown.splitlines()[1:]


@pytest.mark.programs
@pytest.mark.apart
def test_machines_of_a_file_serve_together_and_come_back(tmp_path: Path) -> None:
    """`mlx.launch` runs the command twice; the rank that is led dies and joins the first rank's next group."""
    hostfile = tmp_path / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    port = unused_port()
    words = (
        f"-m mlx_tandem serve {shlex.quote(str(demo.MODEL_PATH))} --port {port} --max-model-len 512 --num-blocks 128"
    )
    words += f" --distributed-mode ring --distributed-hostfile {hostfile}"
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(words)], stdout=log, stderr=log, start_new_session=True, cwd=tmp_path
        )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0}

    def is_up() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            return client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        until(is_up)
        said = client.post("/v1/completions", json=body).json()["choices"][0]["text"]
        led = int(next(row for row in running() if RANK in row).split()[0])
        os.kill(led, signal.SIGKILL)
        until(lambda: not is_up())
        until(is_up)
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == said
    finally:
        process.kill()  # the launcher; what it has started ends with it
        process.wait()
        client.close()
    until(lambda: not any(str(hostfile) in row or f"{RANK} --rank 1" in row for row in running()))
