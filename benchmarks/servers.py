"""Starts and stops the servers that are compared: same model folder, same BLAS, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlx_tandem.cli.bench.serve import measure
from mlx_tandem.cli.bench.workloads import Load
from mlx_tandem.http_client import Connection, HttpError
from mlx_tandem.server.sockets import unused_port

OPENBLAS = "libopenblas.so.0"


@dataclass(frozen=True)
class Running:
    """A server that is ready."""

    url: str
    pid: int
    start_s: float  # seconds from the start of the process until it was ready

    def device(self) -> str:
        """Return what the server computes on, in its own words."""
        connection = Connection.to(self.url)
        _, health = asyncio.run(connection.json("GET", "/health"))
        return str(health["engine"]["device"])

    def rss(self) -> int:
        """Return the bytes of memory of the process and of those that it started."""
        listed = subprocess.run(["ps", "-eo", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
        rows = [tuple(map(int, line.split())) for line in listed.splitlines()]
        family = {self.pid}
        for _ in rows:  # children may stand before their parents
            grown = family | {pid for pid, parent, _ in rows if parent in family}
            if grown == family:
                break
            family = grown
        return 1024 * sum(kilobytes for pid, _, kilobytes in rows if pid in family)


@dataclass(frozen=True)
class Server:
    """The command that starts one server, in which `{model}` and `{port}` are filled in."""

    name: str
    command: tuple[str, ...]
    preload_blas: bool = True  # tandem loads OpenBLAS by itself
    environment: Mapping[str, str] | None = None  # by default this process's

    @contextlib.contextmanager
    def running(self, model: Path) -> Iterator[str]:
        """Start the server with this model, yield its URL when it is ready, and stop it at the end of the block."""
        with self.started(model) as server:
            yield server.url

    @contextlib.contextmanager
    def started(self, model: Path, seconds: float = 180.0) -> Iterator[Running]:
        """Start the server with this model, yield it when it is ready, and stop it at the end of the block."""
        port = unused_port()
        command = [part.format(model=model, port=port) for part in self.command]
        environment = dict(self.environment or os.environ) | {"HF_HUB_OFFLINE": "1"}
        if self.preload_blas and _has_openblas():
            environment["LD_PRELOAD"] = OPENBLAS
        with tempfile.TemporaryFile() as log:
            began = time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                deadline = time.monotonic() + seconds
                while not asyncio.run(_answers(port)):
                    if process.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"{self.name} did not start: {shlex.join(command)}")
                    time.sleep(0.05)
                yield Running(f"http://127.0.0.1:{port}", process.pid, time.monotonic() - began)
            except Exception:
                log.seek(0)
                print(f"{self.name} said last:\n{log.read().decode(errors='replace')[-3000:]}", file=sys.stderr)
                raise
            finally:
                _stop(process)


def tandem(*options: str) -> Server:
    """Return this project's server, with the options in the variable BENCHMARK_SERVER_OPTIONS besides."""
    more = shlex.split(os.environ.get("BENCHMARK_SERVER_OPTIONS", ""))
    command = (sys.executable, "-m", "mlx_tandem", "serve", "{model}", "--port", "{port}", *options, *more)
    return Server("tandem", command, preload_blas=False)


def mlx_lm_server() -> Server:
    """Return mlx-lm's server."""
    return Server("mlx_lm.server", (sys.executable, "-m", "mlx_lm", "server", "--model", "{model}", "--port", "{port}"))


def vllm_mlx(executable: Path) -> Server:
    """Return vllm-mlx's server; `executable` is in an environment of its own: pip install 'mlx[cpu]'
    vllm-mlx==0.6.0.
    """
    return Server(
        "vllm-mlx",
        (str(executable), "serve", "{model}", "--host", "127.0.0.1", "--port", "{port}", "--continuous-batching"),
    )


def in_turn(servers: Sequence[Server], model: Path, load: Load, repeats: int) -> dict[str, list[dict[str, object]]]:
    """Measure each server `repeats` times, started afresh, with the order turned by one each time; return rounds by
    server.

    A round is the whole of `load` once, after one that is not counted, in which servers compile. Its entries have
    the concurrency and the figures.
    """
    rounds: dict[str, list[dict[str, object]]] = {server.name: [] for server in servers}
    for repeat in range(repeats):
        turn = repeat % len(servers)
        for server in [*servers[turn:], *servers[:turn]]:
            with server.running(model) as url:
                once = replace(load, url=url, repeats=1)
                measure(once)
                result = measure(once)
            for row in result["results"]:
                figures = row["rounds"][0]
                rounds[server.name].append({"repeat": repeat, "concurrency": row["concurrency"]} | figures)
                print(
                    f"{model.name}  repeat {repeat + 1}/{repeats}  {server.name:<14}  {row['concurrency']:>3} at once"
                    f"  {figures['events_per_s']:>9,.0f} events/s  {figures['tokens_per_s']:>9,.0f} tok/s"
                    + (f"  {figures['errors']} errors: {figures['first_error']}" if figures["errors"] else ""),
                    file=sys.stderr,
                    flush=True,
                )
    return rounds


async def _answers(port: int) -> bool:
    connection = Connection("127.0.0.1", port)
    try:
        status, _ = await connection.json("GET", "/health")
    except HttpError:
        return False
    connection.close()
    return status == 200


def _has_openblas() -> bool:
    if sys.platform != "linux":
        return False
    try:
        ctypes.CDLL(OPENBLAS)
    except OSError:
        return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
