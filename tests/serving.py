"""Real servers for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from mlx_tandem import demo
from mlx_tandem.config import CacheConfig, Config, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from tests import outbound

ROOT = Path(__file__).parents[1]
ADAPTER_ROOT = demo.ADAPTER_PATHS["shout"].parent
ADAPTERS = tuple((name, str(path)) for name, path in demo.ADAPTER_PATHS.items())


def demo_config(model: Path = demo.MODEL_PATH, **server: object) -> Config:
    """The built-in model and adapters with a short context and a small pool, so that a test server starts quickly."""
    return Config(
        engine=EngineConfig(
            model=ModelConfig(path=str(model), max_model_len=1024),
            cache=CacheConfig(num_blocks=1025),
            scheduler=SchedulerConfig(max_num_seqs=32),
            heartbeat_seconds=0.1,
        ),
        server=ServerConfig(port=0, served_model_names=("tandem-demo",), **server),
        adapters=ADAPTERS,
        adapter_root=str(ADAPTER_ROOT),
    )


@dataclass
class RunningServer:
    url: str
    process: subprocess.Popen[str]
    client: httpx.Client
    environment: dict[str, str]
    record: Path  # of what its processes tried to open to elsewhere

    def chat(self, text: str, **fields: object) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 16} | fields)

    def complete(self, prompt: object, **fields: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 8} | fields)

    def engine_pid(self) -> int:
        """The engine is one of the server's children."""
        return self.child_pid("mlx_tandem.engine_main")

    def rank_pids(self) -> list[int]:
        """The processes of the other ranks, which are the engine's children."""
        return [pid for pid, _ in self._processes("mlx_tandem.rank_main")]

    def child_pid(self, program: str) -> int:
        """The server's child that runs this module."""
        children = [pid for pid, parent in self._processes(program) if parent == self.process.pid]
        (pid,) = children
        return pid

    def _processes(self, program: str) -> list[tuple[int, int]]:
        """The number and the parent's number of each of this server's processes that run this module."""
        found = subprocess.run(["ps", "-wweo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in found.splitlines()[1:]]
        parents = {int(pid): int(parent) for pid, parent, _ in rows}
        mine = {int(pid) for pid, _, args in rows if program in args}
        return [
            (pid, parents[pid]) for pid in sorted(mine) if self.process.pid in (parents[pid], parents.get(parents[pid]))
        ]


@contextlib.contextmanager
def serving(config: Config, packages: Path = ROOT, log: Path | None = None) -> Iterator[RunningServer]:
    """A server in a process of its own, ready; ended by SIGTERM. It may import what lies in `packages`, too. What it
    logs under `-v` goes to the file `log`. A connection that it opens to anywhere is refused, and fails the test."""
    record = Path(tempfile.mkdtemp(prefix="serving-")) / "outbound"
    path = os.pathsep.join((str(ROOT), str(packages)))
    ranks = config.engine.parallel.ranks > 1
    environment = outbound.guarded(os.environ | {"PYTHONPATH": path}, record, ranks=ranks)
    with open(log or os.devnull, "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.program", msgspec.json.encode(config).decode(), *(["-v"] if log else [])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors if log else None,
            text=True,
            env=environment,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("port "):
                break
        else:
            raise RuntimeError(f"the server did not start: exit status {process.wait()}")
        url = f"http://127.0.0.1:{int(line.split()[1])}"
        with httpx.Client(base_url=url, timeout=60) as client:
            yield RunningServer(url, process, client, environment, record)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()
            attempts, armed = outbound.tried(record), outbound.armed(record)
            shutil.rmtree(record.parent)
    assert armed >= 2, "the server and its engine are watched"
    assert not attempts, attempts
